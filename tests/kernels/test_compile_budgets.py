"""What `scripts/compile_kernels.py` makes of the assembler's words, and that the committed budgets only tighten the ceilings."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

TEXT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem
        /*0420*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0430*/  UTMALDG.5D [UR4], [UR6] ;
ptxas info    : Compiling entry function 'combine_parts_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for combine_parts_mosaic_gpu_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 111 registers, used 2 barriers, 1 bytes smem
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "scripts" / "compile_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_committed_budgets_only_tighten_the_ceilings(script: ModuleType) -> None:
    budgets = json.loads(script.BUDGETS.read_text())
    assert script.loosened(budgets) == []
    budgets["paged_decode"] |= {"registers": 233, "min_in_flight_bytes": 65535}
    assert script.loosened(budgets) == [
        "the budget of paged_decode for registers, 233, is looser than the ceiling 232",
        "the budget of paged_decode for min_in_flight_bytes, 65535, is looser than the ceiling 65536",
    ]


def test_the_assembler_is_understood(script: ModuleType) -> None:
    shared = {"paged_decode": 1000, "combine_parts": 2000}
    assert script.parse(TEXT, shared) == [
        script.Report("paged_decode", 232, 0, 1000, 1, 1),
        script.Report("combine_parts", 111, 12, 2000, 1, 1),
    ]
    (of_integers,) = script.parse(TEXT.split("ptxas info    : Compiling entry function 'combine")[0].replace("HGMMA", "IGMMA"), shared)
    assert of_integers.matrix_ops == 1
    with pytest.raises(ValueError, match="reports no kernel, of paged_decode, combine_parts"):
        script.parse("", shared)


def test_each_thing_beyond_a_budget_is_named(script: ModuleType) -> None:
    budget = script.CEILINGS["paged_decode"]
    report = script.Report("paged_decode", 232, 0, 227 * 1024, 1, 1)
    assert script.broken(report, 64 * 1024, budget) == []
    beyond = script.Report("paged_decode", 240, 8, 227 * 1024 + 1, 0, 0)
    assert [sentence.removeprefix("paged_decode: ") for sentence in script.broken(beyond, 1000, budget)] == [
        "240 registers, budget 232",
        "8 spilled_bytes, budget 0",
        "232449 shared_bytes, budget 232448",
        "1000 bytes in flight, at least 65536 wanted",
        "no HGMMA or IGMMA instruction",
        "no UTMALDG instruction",
    ]


def test_devices_are_found_between_zero_bytes(script: ModuleType) -> None:
    plugin = b'\x7fELF\0\0gpu { x: 1 }\ndevice_description_str: "NVIDIA H200"\n\0rest\0device_description_str: "B"\0'
    assert script.device_descriptions(plugin) == {
        "NVIDIA H200": 'gpu { x: 1 }\ndevice_description_str: "NVIDIA H200"\n',
        "B": 'device_description_str: "B"',
    }
