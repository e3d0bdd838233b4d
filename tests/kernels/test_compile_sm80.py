"""What `scripts/compile_sm80.py` makes of the assembler's words, and that the committed budgets only tighten the ceilings."""

import json
from types import ModuleType

import pytest

from tests.kernels.loaded_script import load_script

TEXT = """
ptxas info    : Compiling entry function 'sm80_decode_mosaic_gpu_kernel' for 'sm_86'
ptxas info    : Function properties for sm80_decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 135 registers, used 2 barriers, 1 bytes smem
.text.sm80_decode_mosaic_gpu_kernel:
        /*04c0*/                   LDGSTS.E.BYPASS.128 [R9], [R12.64] ;
        /*04e0*/                   LDGDEPBAR ;
        /*2350*/                   DEPBAR.LE SB0, 0x4 ;
        /*2360*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*3b30*/                   DEPBAR.LE SB0, 0x9 ;
ptxas info    : Compiling entry function 'combine_sm80_mosaic_gpu_kernel' for 'sm_86'
    0 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 53 registers, used 2 barriers, 1 bytes smem
.text.combine_sm80_mosaic_gpu_kernel:
        /*2360*/                   FADD R4, R8, R12 ;
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("compile_sm80")


def test_the_committed_budgets_only_tighten_the_ceilings(script: ModuleType) -> None:
    budgets = json.loads(script.BUDGETS.read_text())
    assert script.loosened(budgets) == []
    budgets["combine_sm80"]["registers"] = 169
    assert script.loosened(budgets) == ["the budget of combine_sm80 for registers, 169, is looser than the ceiling 168"]


def test_each_kernel_has_its_own_instructions(script: ModuleType) -> None:
    assert script.parse(TEXT, {"sm80_decode": 77824, "combine_sm80": 0}) == [
        script.Report("sm80_decode", 135, 0, 77824, 1, 1, (4, 9)),
        script.Report("combine_sm80", 53, 12, 0, 0, 0, ()),
    ]
    with pytest.raises(ValueError, match="shows no code of sm80_decode"):
        script.parse(TEXT.replace(".text.sm80", ".data.sm80"), {"sm80_decode": 77824, "combine_sm80": 0})


def test_each_thing_beyond_a_budget_or_a_card_is_named(script: ModuleType) -> None:
    budget = script.CEILINGS["sm80_decode"]
    report = script.Report("sm80_decode", 255, 0, 99 * 1024, 1, 1, (4, 9))
    assert script.broken(report, 32 * 1024, (4, 9), 99 * 1024, budget) == []
    beyond = script.Report("sm80_decode", 256, 8, 99 * 1024 + 1, 0, 0, (9,))
    assert [sentence.removeprefix("sm80_decode: ") for sentence in script.broken(beyond, 1000, (4, 9), 99 * 1024, budget)] == [
        "256 registers, budget 255",
        "8 spilled_bytes, budget 0",
        "101377 bytes of shared memory, and a CTA of this card has 101376",
        "1000 bytes in flight, at least 32768 wanted",
        "no HMMA instruction",
        "no LDGSTS instruction",
        "waits that leave (9,) copies under way, not (4, 9)",
    ]
