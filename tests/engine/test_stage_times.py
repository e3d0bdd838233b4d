"""Traces summed by stage: the arithmetic on spans that are made up, and a trace of a real engine's steps."""

import json
from pathlib import Path

import pytest

from jaxpaged.errors import BadRequestError
from jaxpaged.profiler import traced
from jaxpaged.request import SamplingParams
from jaxpaged.stages import STAGES, stage_of
from jaxpaged.trace.programs import Operation, read_programs
from jaxpaged.trace.stage_times import BETWEEN_STEPS, IN_STEP, NO_STAGE, Span, _owner, read_spans, stage_times, table
from tests.cli.scripted_engine import ScriptedEngine, run_cli
from tests.tiny_engine import tiny_config

pytestmark = pytest.mark.jax


def span(start: float, end: float, stage: str, *, run: int = 0, program: str = "jit_step_4", is_container: bool = False) -> Span:
    """Times in seconds."""
    return Span(start * 1e9, end * 1e9, program, run, stage, is_container)


def test_every_moment_is_given_to_somebody() -> None:
    spans = [
        span(0, 8, "", is_container=True),  # a loop
        span(1, 3, "norm"),
        span(2, 4, "mlp"),  # beside it on another thread
        span(5, 7, "sample", is_container=True),  # a loop inside it
        span(5.5, 6, "mlp"),
        span(6, 6.25, ""),
        span(10, 11, "norm", run=1),
        span(13, 14, "head", program="jit_step_2", run=7),
        span(0, 20, "mlp", program="jit_write"),  # no step
    ]
    times = stage_times(reversed(spans))
    assert times.num_steps == 3
    assert times.wall_s == 14
    assert times.stages == pytest.approx(
        {"norm": 1.5 + 1, "mlp": 1.5 + 0.5, "sample": 0.5 + 0.75, NO_STAGE: 0.25, "head": 1, IN_STEP: 1 + 1 + 1, BETWEEN_STEPS: 2 + 2}
    )
    assert sum(times.stages.values()) == pytest.approx(times.wall_s)
    assert times.programs == {"jit_step_4": (2, 9.0), "jit_step_2": (1, 1.0)}
    shown = table(times).splitlines()
    assert shown[0].endswith("(3 steps)     ms/step   seconds   share")
    assert shown[1].split() == ["(between", "steps)", "1333.333", "4.000", "28.6%"]
    assert [line.split()[0] for line in shown[-2:]] == ["2", "4"]


def test_gaps_of_a_step_whose_operations_overlap_the_next() -> None:
    """Two steps at once: only where neither runs does the device wait."""
    times = stage_times([span(0, 1, "norm", run=0), span(3, 4, "norm", run=0), span(2, 2.5, "mlp", run=1), span(5, 6, "mlp", run=1)])
    assert times.stages == pytest.approx({"norm": 2, "mlp": 1.5, IN_STEP: 2.5})


def test_a_trace_without_steps() -> None:
    with pytest.raises(BadRequestError, match="no step ran"):
        stage_times([span(0, 1, "norm", program="jit_other")])


def test_stages_in_names_of_operations() -> None:
    assert stage_of("jit(step_4)/call_exported/jit(<lambda>)/while/body/attention/kv_write/scatter") == "attention/kv_write"
    assert stage_of("jit(step_4)/mlp/mlp/dot_general") == "mlp"
    assert stage_of("reduce_sum") == ""


def test_the_program_that_knows_the_operations_is_theirs() -> None:
    """Numbers of programs out of the cache say nothing."""
    one, other = ({name: Operation(stage, is_container=False) for name in names} for stage, names in (("mlp", "abc"), ("norm", "abd")))
    programs = {"m(1)": one, "m(2)": other, "mm(3)": one}
    assert _owner(programs, "m", 1, {"a", "d"}) is other
    assert _owner(programs, "m", 9, {"b", "c"}) is one
    assert _owner(programs, "m", 2, {"a"}) is other
    assert _owner(programs, "n", 1, {"a"}) == {}


def test_a_trace_of_an_engine(tiny_folder: Path, programs: Path, tmp_path: Path) -> None:
    """Every stage that works for such requests is found, on CPU as well; what no stage claims is little."""
    from jaxpaged.llm import LLM

    config = tiny_config(tiny_folder, programs=programs, quantization="int8", token_buckets=(16,), max_num_batched_tokens=16)
    llm = LLM(config=config)
    try:
        with traced(tmp_path):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5), use_tqdm=False)
    finally:
        llm.close()
    (path,) = tmp_path.rglob("*.xplane.pb")
    trace = path.read_bytes()
    spans = read_spans(trace)
    seen = {one.stage for one in spans if one.program.startswith("jit_step_")}
    assert {"norm", "mlp", "head", "sample", "unpack", "attention/qkv", "attention/kv_write", "attention/attend", "attention/out"} <= seen
    words = {word for program in read_programs(trace).values() for operation in program.values() for word in operation.stage.split("/")}
    assert words - {""} == STAGES
    num_steps = len({(one.program, one.run) for one in spans if one.program.startswith("jit_step_")})
    result = run_cli("bench", "profile", str(tmp_path))
    read = json.loads(result.out.splitlines()[-1])
    assert (result.status, read["benchmark"], read["num_steps"]) == (0, "profile", num_steps)
    assert num_steps >= 4
    assert sum(read["stages_s"].values()) == pytest.approx(read["wall_s"])
    assert sum(bucket["steps"] for bucket in read["buckets"].values()) == read["num_steps"]


@pytest.mark.parametrize("damage", [lambda trace: trace[:-3], lambda trace: b"\x07" + trace, lambda _: b"\xff" * 30])
def test_what_is_no_trace(damage: object) -> None:
    plane = b"\x12\x0e/host:metadata" + b"\x22\x06\x12\x04\x12\x02ab"
    trace = b"\x0a" + bytes([len(plane)]) + plane
    assert read_programs(trace) == {}
    assert callable(damage)
    with pytest.raises(BadRequestError, match="no trace of JAX's profiler"):
        read_programs(damage(trace))


def test_generate_writes_a_trace_and_says_how_to_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    result = run_cli("generate", "hello", "--profile", str(folder), engine=ScriptedEngine())
    assert (result.status, result.out) == (0, "olleh\n")
    assert result.err.endswith(f"\ntrace below {folder}; where the time went: jaxpaged bench profile {folder}\n")
    (trace,) = folder.rglob("*.xplane.pb")
    assert trace.stat().st_size > 0


def test_no_folder_and_no_trace(tmp_path: Path) -> None:
    assert "there is no trace under" in run_cli("bench", "profile", str(tmp_path)).sentence
    assert "takes the folder" in run_cli("bench", "profile").sentence
