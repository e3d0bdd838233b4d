"""What fits in memory, worked out from a config alone: exact against models really loaded, and refused before weights are read."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged import build, cli, fit_check
from jaxpaged.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from jaxpaged.errors import ConfigError, MemoryBudgetError
from jaxpaged.fit_check import FitCheck
from jaxpaged.kv_cache import cache_shape, make_cache
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.sources import resolve
from jaxpaged.memory_plan import Room
from jaxpaged.model_loader import ModelDescription, convert_weights, describe_model
from jaxpaged.parallel.cuts import cut_parameters, own_part, replica_shape
from jaxpaged.parallel.mesh_config import TABLE, MeshShape
from jaxpaged.parameter_sizes import parameter_sizes, weight_bytes
from tests.models.cases import FAMILY_CASES, Case
from tests.models.encoder_cases import VOCAB as ENCODER_VOCAB
from tests.tiny_engine import start_tiny
from tests.tiny_families import write_tiny_bert
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax

GIB = 2**30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
"""Llama 3.1 8B, which has 8,030,261,248 weights."""
LLAMA_8B_WEIGHTS = 8_030_261_248
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Keys and values of one of its tokens in bfloat16."""


def config_only(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changes}))
    return folder


def described(folder: Path, *, is_gpu: bool = True, **model: Any) -> tuple[Config, ModelDescription]:
    config = Config(model=ModelConfig(model=str(folder), load_format="dummy", **model))
    with open_checkpoint(resolve(config.model), load_format="dummy") as checkpoint:
        return config, describe_model(config.model, checkpoint, is_gpu=is_gpu).description


# The first is 576 wide for other reasons.
SMALL = (Case("llama", "LlamaForCausalLM", write_tiny_llama, {"has_tokenizer": False}, (0,)), *FAMILY_CASES[1:])
BERT = Case("bert", "BertModel", write_tiny_bert, {"vocab_size": ENCODER_VOCAB}, (0,))


@pytest.mark.parametrize("case", [*SMALL, BERT], ids=lambda case: case.name)
def test_weights_and_pages_of_every_family_are_exact(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path, **case.options)
    config = Config(model=ModelConfig(model=str(tmp_path)), cache=CacheConfig(memory=2**20))
    with open_checkpoint(resolve(config.model)) as checkpoint:
        model = describe_model(config.model, checkpoint, is_gpu=False)
        arrays = convert_weights(checkpoint, model)
    _, by_config = described(tmp_path, is_gpu=False)
    plan = FitCheck(config, by_config, Room(GIB, takes_all=False)).plan()
    assert plan.weight_bytes == sum(array.nbytes for array in arrays.values())
    pool = make_cache(cache_shape(model.facts, config.cache), plan.num_pages)
    assert plan.pool_bytes == pool.k.nbytes + pool.v.nbytes
    assert 2**20 - pool.k.nbytes // plan.num_pages * 2 < plan.pool_bytes <= 2**20


def test_llama_3_1_8b_by_its_config_alone(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path), max_model_len=8192)
    plan = FitCheck(config, description, Room(40 * GIB)).plan()
    assert (plan.weight_bytes, plan.dtype_name) == (2 * LLAMA_8B_WEIGHTS, "bfloat16")
    page = 16 * TOKEN_BYTES
    free = 40 * GIB - plan.weight_bytes - plan.step_bytes - int(0.03 * 40 * GIB)
    assert abs(plan.pool_bytes - free) <= page
    assert plan.tokens == (plan.num_pages - 1) * 16 == (plan.pool_bytes // page - 1) * 16
    assert plan.full_requests == plan.tokens // 8192
    assert plan.fits


@pytest.mark.parametrize(("devices", "kv_parts"), [(2, 2), (8, 8), (16, 8), (32, 8)])
def test_shares_of_devices(devices: int, kv_parts: int, tmp_path: Path) -> None:
    """KV heads are split as far as there are some; norms lie everywhere; a vocabulary that does not come out even is padded."""
    config, description = described(config_only(tmp_path, vocab_size=128257), max_model_len=8192)
    plan = FitCheck(config, description, Room(40 * GIB)).plan(MeshShape(tensor=devices))
    layer = 2 * 4096 * 4096 // devices + 2 * 4096 * 1024 // kv_parts + 3 * 4096 * 14336 // devices + 2 * 4096
    assert plan.weight_bytes == 2 * (32 * layer + 4096 + 2 * 4096 * -(-128257 // devices))
    assert plan.pool_bytes == plan.num_pages * 16 * TOKEN_BYTES // kv_parts


def test_devices_that_cannot_share_the_heads_are_refused(tmp_path: Path) -> None:
    check = FitCheck(*described(config_only(tmp_path)), Room(40 * GIB))
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 32 heads; allowed: 1, 2, 4, 8, 16, 32"):
        check.plan(MeshShape(tensor=3))


MIXTURES = {case.name: case for case in FAMILY_CASES if "experts" in case.options}
MESHES = [
    *((case, MeshShape(tensor=tensor)) for case in SMALL if case.name in ("llama", "olmo2") for tensor in (2, 3)),
    (MIXTURES["mixtral"], MeshShape(expert=5)),
    (MIXTURES["mixtral"], MeshShape(tensor=6, expert=5)),
    (MIXTURES["qwen2moe"], MeshShape(tensor=3, expert=7)),
    (MIXTURES["gptoss"], MeshShape(tensor=2, expert=5)),
    (MIXTURES["gptoss"], MeshShape(tensor=2, expert=5, table={"ffw": "tensor", "experts": "expert"})),
    (MIXTURES["qwen3moe"], MeshShape(tensor=2, expert=7, table={key: axis for key, axis in TABLE.items() if key != "experts"})),
]


@pytest.mark.parametrize(("case", "mesh"), MESHES, ids=lambda value: getattr(value, "name", None))
def test_each_device_of_a_mesh_gets_what_was_planned(case: Case, mesh: MeshShape, tmp_path: Path) -> None:
    """Byte by byte what `Replica.put` sends to it, and its part of the pool."""
    if case.name == "llama" and mesh.tensor == 3:
        case = case._replace(options={**case.options, "heads": 6, "kv_heads": 2, "head_dim": 8})
    case.write(tmp_path, **case.options)
    config, description = described(tmp_path, is_gpu=False)
    plan = FitCheck(config, description, Room(GIB)).plan(mesh)
    with open_checkpoint(resolve(config.model), load_format="dummy") as checkpoint:
        model = describe_model(config.model, checkpoint, is_gpu=False)
        arrays = convert_weights(checkpoint, model)
    structure, shape = model.structure(), replica_shape(mesh, model.facts.kv_heads)
    cuts = cut_parameters(structure.family.WEIGHTS, structure.config.axis_sizes, shape)
    for place in (dict.fromkeys(shape.sizes, 0), {axis: size - 1 for axis, size in shape.sizes.items()}):
        assert plan.weight_bytes == sum(own_part(array, cuts[path], place, shape.sizes).nbytes for path, array in arrays.items())
    assert plan.weight_bytes < weight_bytes(description.sizes, {})
    page = cache_shape(model.facts, config.cache, num_parts=shape.pool_parts).page_bytes
    assert plan.pool_bytes == plan.num_pages * page


MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
EXPERT_BYTES = 2 * 32 * 8 * 3 * 4096 * 14336


def test_a_mixture_over_an_expert_mesh(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path, **MIXTRAL_8X7B), max_model_len=32768)
    whole = weight_bytes(description.sizes, {})
    plan = FitCheck(config, description, Room(80 * GIB)).require(MeshShape(expert=4))
    assert plan.weight_bytes == whole - EXPERT_BYTES * 3 // 4
    assert dict(fit_check.table(plan))["devices"] == "4 (expert parallel)"
    both = FitCheck(config, description, Room(80 * GIB)).require(MeshShape(tensor=2, expert=4))
    assert dict(fit_check.table(both))["devices"] == "8 (tensor 2 x expert 4)"
    assert both.pool_bytes // both.num_pages == plan.pool_bytes // plan.num_pages // 2
    with pytest.raises(ConfigError, match="the mesh axis expert 3 does not divide the model's 8 experts; allowed: 1, 2, 4, 8"):
        FitCheck(config, description, Room(80 * GIB)).plan(MeshShape(expert=3))


def test_changes_of_a_mixture_name_what_its_mesh_can_be(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path / "model", **MIXTRAL_8X7B), max_model_len=32768)
    assert FitCheck(config, description, Room(80 * GIB)).changes(MeshShape())[-1].words == "--tensor-parallel-size 2"
    file = tmp_path / "mesh.yaml"
    file.write_text("axes: {expert: 2}")
    on_file = msgspec.structs.replace(config, parallel=ParallelConfig(mesh=str(file)))
    check = FitCheck(on_file, description, Room(38 * GIB))
    with pytest.raises(MemoryBudgetError, match=f"each device has .*axes.tensor: 2 in {file}"):
        check.require()
    (change,) = [change for change in check.changes(MeshShape(expert=2)) if change.plan.num_devices > 2]
    assert change.plan == check.require(MeshShape(tensor=2, expert=2))
    # Seven heads can be shared by seven devices alone, and its experts by two.
    odd = config_only(tmp_path / "odd", **MIXTRAL_8X7B, num_attention_heads=7, num_key_value_heads=7, head_dim=128)
    check = FitCheck(*described(odd, max_model_len=32768), Room(60 * GIB))
    assert check.changes(MeshShape())[-1].words == "a mesh file (--parallel.mesh) with axes.expert: 2"


def test_devices_that_are_one_machine_share_its_memory(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path), is_gpu=False, dtype="bfloat16")
    one = FitCheck(config, description, Room(20 * GIB, takes_all=False)).require()
    assert one.room_bytes == 20 * GIB
    assert FitCheck(config, description, Room(20 * GIB, takes_all=False)).plan(MeshShape(tensor=2)).room_bytes == 10 * GIB
    with pytest.raises(MemoryBudgetError, match="each of 2 devices of this machine has 10.00 GiB"):
        FitCheck(config, description, Room(20 * GIB, takes_all=False)).require(MeshShape(data=2))


def test_axes_of_parameters() -> None:
    class Like:
        shape, dtype = (3, 5, 6, 4), "float32"

    table = {"a.{layer}.{expert}": ("x", "(heads head_dim) embed -> (heads head_dim) embed")}
    (known, unknown) = parameter_sizes({"x": Like(), "y": Like()}, table)
    assert (known.axes, unknown.axes) == (("layers", "experts", "heads", "embed"), ("", "", "", ""))
    assert weight_bytes((known, unknown), {"heads": 4, "experts": 2, "": 7}) == 4 * (3 * 3 * 2 * 4 + 1 * 1 * 1 * 1)


def test_auto_is_the_longest_that_fits(tmp_path: Path) -> None:
    room = Room(24 * GIB)
    auto = FitCheck(*described(config_only(tmp_path), max_model_len="auto"), room).require()
    assert 16 <= auto.max_model_len == auto.tokens < 131072
    assert FitCheck(*described(tmp_path, max_model_len=auto.max_model_len), room).plan().fits
    assert not FitCheck(*described(tmp_path, max_model_len=auto.max_model_len + 1), room).plan().fits


def test_what_does_not_fit_is_refused_with_the_three_best_changes(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path), max_model_len=131072, dtype="float32")
    check = FitCheck(config, description, Room(40 * GIB))
    with pytest.raises(MemoryBudgetError) as caught:
        check.require()
    message = caught.value.message
    assert "29.92 GiB of weights (float32)" in message
    assert "32.00 GiB of the pages of one request (131,072 tokens)" in message
    assert message.count("requests of") + message.count("request of") == 3
    (first, second, third) = check.changes(MeshShape())
    assert third.words == "--tensor-parallel-size 2"
    assert first.words == "--dtype bfloat16"
    assert (first.plan.full_requests, first.plan.weight_bytes) == (1, 2 * LLAMA_8B_WEIGHTS)
    assert second.words.startswith("--max-model-len ")
    assert second.words.endswith(" instead of 131072")
    assert all(f"; {change}" in message or f": {change}" in message for change in (first, second, third))
    assert all(change.plan.fits for change in (first, second, third))
    # What a change promises is what a start with it finds.
    redone, other = described(tmp_path, max_model_len=131072, dtype="bfloat16")
    assert FitCheck(redone, other, Room(40 * GIB)).require() == first.plan


def test_two_changes_at_once_where_one_is_not_enough(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path), max_model_len=131072, dtype="float32")
    changes = FitCheck(config, description, Room(22 * GIB)).changes(MeshShape())
    assert changes[-1].words == "--tensor-parallel-size 4"
    longest = changes[0].plan.max_model_len
    assert changes[0].words == f"--dtype bfloat16 and --max-model-len {longest} instead of 131072"
    assert changes[0].plan.tokens == longest > 30_000
    assert all(" and " in change.words for change in changes[:-1])
    assert all(change.plan.fits for change in changes)


def test_a_second_change_that_allows_longer_texts_is_told_too(tmp_path: Path) -> None:
    config, description = described(config_only(tmp_path), max_model_len=131072)
    changes = FitCheck(config, description, Room(22 * GIB)).changes(MeshShape())
    assert changes[0].words == f"--max-model-len {changes[0].plan.max_model_len} instead of 131072"
    assert changes[1].words.startswith("--cache.dtype fp8_e4m3 and --max-model-len ")
    assert changes[2].words == "--tensor-parallel-size 2"
    assert changes[1].plan.max_model_len == pytest.approx(2 * changes[0].plan.max_model_len, rel=0.001)


def test_where_nothing_helps_it_says_what_would(tmp_path: Path) -> None:
    check = FitCheck(*described(config_only(tmp_path)), Room(GIB // 4))
    with pytest.raises(MemoryBudgetError, match=r"no option makes it fit: take a smaller model, or devices with 1\d\.\d\d GiB and more"):
        check.require()


def test_on_the_cpu_the_pool_is_part_of_what_must_fit(tmp_path: Path) -> None:
    folder = config_only(tmp_path)
    config, description = described(folder, is_gpu=False, dtype="bfloat16")
    assert FitCheck(config, description, Room(17 * GIB, takes_all=False)).require().pool_bytes <= GIB // 2
    large = Config(model=config.model, cache=CacheConfig(memory=2 * GIB), scheduler=SchedulerConfig(max_num_seqs=2))
    with pytest.raises(MemoryBudgetError, match="this machine has 17.00 GiB"):
        FitCheck(large, description, Room(17 * GIB, takes_all=False)).require()


def test_a_start_is_refused_before_any_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_no_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    write_tiny_llama(tmp_path)
    for name in ("read_ahead", "load"):
        monkeypatch.setattr(build.ModelSource, name, read_no_weights)
    monkeypatch.setattr(build, "room_here", lambda: Room(2**20, takes_all=False))
    with pytest.raises(MemoryBudgetError, match=r"does not fit: .* this machine has 1\.0 MiB .*: --cache\.memory \d+KiB"):
        start_tiny(tmp_path, programs=tmp_path)
    monkeypatch.setattr(build, "room_here", lambda: Room(2**30, takes_all=False))
    with pytest.raises(AssertionError, match="weights were read"):
        start_tiny(tmp_path, programs=tmp_path)


def plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(config_only(tmp_path))
    assert plan(folder, "--device-memory", "80GiB", "--devices", "2") == 0
    shown = capsys.readouterr().out
    assert "devices                  2 (tensor parallel)" in shown
    assert f"weights                  {(LLAMA_8B_WEIGHTS + 4096 * 65) / GIB:.2f} GiB on each device (bfloat16)" in shown
    assert plan(folder, "--device-memory", "80GiB", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == 2 * LLAMA_8B_WEIGHTS
    assert plan(folder, "--device-memory", "24GiB", "--max-model-len", "131072") == 2
    refused = capsys.readouterr().err
    assert refused.startswith("jaxpaged: the model does not fit: 14.96 GiB of weights (bfloat16)")
    assert refused.count("\n") == 1
    assert "--max-model-len" in refused
    assert plan(folder, "--device-memory", "much") == 2
    assert "--device-memory 'much': not a count" in capsys.readouterr().err
    monkeypatch.setattr(fit_check, "host_memory", lambda: None)
    assert plan(folder) == 2
    assert "give --device-memory" in capsys.readouterr().err
