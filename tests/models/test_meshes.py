"""A model over a mesh is the same model: its ids, what each device holds, and what the devices say to each other.

All cases run in one process with eight fake devices (`sharded.py`); here stands what has to come out.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.models import ARCHITECTURES
from tests.models.cases import FAMILY_CASES

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.jax, pytest.mark.timeout(3600)]

LONG = pytest.mark.tier("long", area="models")
ATOL = 1e-4
"""Between two orders of the same sums in float32; logits here have a root mean square of 1."""


def ran(part: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.models.sharded", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def gate() -> dict[str, Any]:
    return ran("gate")


@pytest.fixture(scope="module")
def long() -> dict[str, Any]:
    return ran("long")


def sizes_of(name: str) -> dict[str, int]:
    """ "llama kv2 tensor8" -> {"kv": 2, "tensor": 8}."""
    words = [word.rstrip("0123456789") for word in name.split()]
    return {word: int(given[len(word) :]) for word, given in zip(words, name.split(), strict=True) if given != word}


def check_compared(results: dict[str, Any]) -> int:
    """Ids are equal wherever the choice is no tie; ties are rare."""
    compared = {name: result for name, result in results.items() if "num_ids" in result}
    for name, result in compared.items():
        assert result["differing"] == [], name
        assert result["difference"] < ATOL, name
    num_ids = sum(result["num_ids"] for result in compared.values())
    assert sum(result["ties"] for result in compared.values()) <= 1 + num_ids // 500
    return len(compared)


def check_engines(results: dict[str, Any]) -> None:
    answers = {name: result["ids"] for name, result in results.items() if name.startswith("engine")}
    first = answers.pop("engine tensor1")
    assert len(answers) >= 1
    assert all(len(ids) == 12 for ids in first[0])
    assert first[0] == first[1] == first[2]
    assert {name: ids for name, ids in answers.items() if ids != first} == {}


def test_ids_over_a_mesh_are_those_of_one_device(gate: dict[str, Any]) -> None:
    assert check_compared(gate) >= 12


def test_every_family_is_run_over_a_mesh(gate: dict[str, Any]) -> None:
    """A family is a file of `jaxpaged/models`; its variants run in the long tier."""
    run = {word for name in gate for word in name.split()[:2]}
    files = {line.family: set() for line in ARCHITECTURES.values()}
    for case in FAMILY_CASES:
        files[ARCHITECTURES[case.architecture].family].add(case.name)
    files["bert"].add("bert")
    assert [family for family, names in files.items() if not names & run] == []


@pytest.mark.parametrize("name", ["llama kv2 tensor4", "llama kv1 tensor8", "llama prime tensor4"])
def test_each_device_holds_its_share(gate: dict[str, Any], name: str) -> None:
    """Heads, feed-forward blocks and vocabulary are dealt out; key heads and their pages as far as there are enough of them."""
    sizes = sizes_of(name)
    kv_heads = sizes.get("kv", 6)
    assert gate[name]["pool_share"] == pytest.approx(1 / math.gcd(sizes["tensor"], kv_heads))
    assert 1 / sizes["tensor"] <= gate[name]["share"] < 1 / sizes["tensor"] + 0.08


def check_collectives(results: dict[str, Any]) -> None:
    """Two sums a layer, the second of a mixture over both axes; one behind the embedding; one all-gather of logits.

    OLMo 2 norms rows: two sums more, which XLA makes one of where both go over the same devices.
    """
    for name, result in results.items():
        for found in result.get("collectives", []) if "num_ids" in result else []:
            counts = Counter((one["kind"], one["place"]) for one in found)
            sizes = sizes_of(name)
            is_cut = sizes.get("tensor", 2 if name.startswith("family") else 1) > 1
            is_dealt = sizes.get("expert", 1) > 1
            in_layer = ((3, 4) if "olmo2" in name else (2,)) if is_cut else (int(is_dealt),)
            assert counts.pop(("all-reduce", "body"), 0) in in_layer, name
            assert counts == ({("all-reduce", "step"): 1, ("all-gather", "step"): 1} if is_cut else {}), name


def test_every_family_talks_as_little_as_it_can(gate: dict[str, Any]) -> None:
    assert sum(len(result.get("collectives", [])) for name, result in gate.items() if not name.startswith("engine")) >= 12
    check_collectives(gate)


def test_experts_are_dealt_out(gate: dict[str, Any]) -> None:
    assert gate["qwen2moe expert2"]["share"] < 0.8
    assert gate["qwen2moe tensor2 expert4"]["share"] < 0.4


def test_what_convert_wrote_goes_part_by_part_to_each_device(gate: dict[str, Any]) -> None:
    """The bytes of a load from safetensors, and the host never has more of a parameter than a device's part."""
    restored = {name: result for name, result in gate.items() if name.startswith("restored")}
    assert len(restored) == 4
    for name, result in restored.items():
        assert result["differing"] == [], name
        assert result["largest_read"] <= result["largest_held"] < result["largest_whole"], name
        assert result["num_read"] <= result["num_held"], name


def test_answers_over_a_mesh_are_those_of_one_device(gate: dict[str, Any]) -> None:
    """Through scheduler, sampler, prefix cache, a sleep and two copies of the model; greedy, drawn, and shaped by penalties and biases."""
    check_engines(gate)


def test_copies_have_devices_and_pages_of_their_own(gate: dict[str, Any]) -> None:
    assert gate["engine data2 tensor4"]["devices"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(number > 0 for number in gate["engine data2 tensor4"]["num_cached"])


def test_all_devices_choose_the_same_ids(gate: dict[str, Any]) -> None:
    assert gate["engine data2 tensor4"]["devices_agree"]


def test_nothing_is_compiled_while_a_mesh_serves(gate: dict[str, Any]) -> None:
    assert gate["engine data2 tensor4"]["num_compiled_while_running"] == 0


def test_the_devices_talk_as_little_as_they_can(gate: dict[str, Any]) -> None:
    """Two sums a layer, one behind the embedding, and the logits of the sampled rows.

    Log-probabilities of prompts are asked for now and then: the logits for them are gathered in a branch of their own.
    """
    assert gate["engine tensor1"]["collectives"] == [[]]
    for collectives in gate["engine data2 tensor4"]["collectives"]:
        found = Counter((one["kind"], one["place"]) for one in collectives)
        assert found == {("all-reduce", "body"): 2, ("all-reduce", "step"): 1, ("all-gather", "step"): 1, ("all-gather", "branch"): 1}
        assert [one["shape"] for one in collectives if (one["kind"], one["place"]) == ("all-gather", "step")] == ["f32[8,296]"]


@LONG
def test_the_full_matrix(long: dict[str, Any]) -> None:
    assert check_compared(long) >= 80
    check_collectives(long)


@LONG
def test_the_engine_over_every_mesh(long: dict[str, Any]) -> None:
    check_engines(long)
