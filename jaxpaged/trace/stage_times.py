"""Where the time of steps goes: the operations of a trace, summed by stage.

Each moment of the trace belongs to whatever operations run in it, in equal parts where several run side by side on threads or
streams, so that the stages, what is left inside steps and what lies between steps add up to the wall time.
"""

import heapq
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxpaged.errors import BadRequestError
from jaxpaged.trace.programs import Operation, Program, read_programs

NO_STAGE = "(no stage)"
"""Operations that belong to none: copies that the compiler added, and the like."""
IN_STEP = "(between operations)"
"""A step runs, and none of its operations does: XLA's own work."""
BETWEEN_STEPS = "(between steps)"
"""No step runs: the device waits for the host."""
STEP_PREFIX = "jit_step_"
UNKNOWN = Operation("", is_container=False)


class Span(NamedTuple):
    """An operation that ran.

    Attributes:
        program: the module's name.
        run: number of the run of the program.
        is_container: whether its time is that of others inside it, as far as one of them runs.
    """

    start_ns: float
    end_ns: float
    program: str
    run: int
    stage: str
    is_container: bool


class StageTimes(NamedTuple):
    """A trace, summed.

    Attributes:
        num_steps: steps that ran.
        wall_s: from the first to the end of the last of them.
        stages: seconds by path of stages, and by the three words in brackets; together `wall_s`.
        programs: steps and seconds by the program's name.
    """

    num_steps: int
    wall_s: float
    stages: dict[str, float]
    programs: dict[str, tuple[int, float]]


def read_stage_times(folder: Path) -> StageTimes:
    """Sums the newest trace under a folder.

    Raises:
        BadRequestError: there is none, or no step is in it.
    """
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise BadRequestError(f"there is no trace under {folder} (no file *.xplane.pb)")
    return stage_times(read_spans(traces[-1].read_bytes()))


def read_spans(trace: bytes) -> list[Span]:
    """The operations of a trace. Raises BadRequestError when the bytes are none."""
    from jax.profiler import ProfileData

    programs = read_programs(trace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a type of JAX's own extension has no module
        planes = list(ProfileData.from_serialized_xspace(trace).planes)
        on_device = [plane for plane in planes if plane.name.startswith("/device:")]
        # The host's plane has the operations of a CPU; beside a GPU, the calls that start them.
        ran = [one for plane in on_device or planes for line in plane.lines for one in _ran_in_line(line.events)]
    names: dict[tuple[str, int], set[str]] = defaultdict(set)
    for one in ran:
        names[one.module, one.program_id].add(one.name)
    owners = {(module, number): _owner(programs, module, number, seen) for (module, number), seen in names.items()}
    spans = []
    for one in ran:
        operation = owners[one.module, one.program_id].get(one.name, UNKNOWN)
        spans.append(Span(one.start_ns, one.end_ns, one.module, one.run, operation.stage, operation.is_container))
    return spans


class _Ran(NamedTuple):
    """An operation that ran, by the names in its event."""

    start_ns: float
    end_ns: float
    module: str
    program_id: int
    run: int
    name: str


def _ran_in_line(events: Iterable[Any]) -> Iterator[_Ran]:
    """Those of one thread or stream. An operation that goes on without its thread ends with an event of its own."""
    opened: dict[int, _Ran] = {}
    for event in events:
        facts = dict(event.stats)
        if "hlo_op" in facts:
            run = int(facts.get("run_id") or facts.get("group_id") or 0)
            number, end_ns = int(facts.get("program_id") or 0), event.start_ns + event.duration_ns
            one = _Ran(event.start_ns, end_ns, facts["hlo_module"], number, run, facts["hlo_op"])
            if "_p" in facts:
                opened[facts["_p"]] = one
            else:
                yield one
        elif event.name.startswith("end: ") and (started := opened.pop(facts.get("_c", -1), None)) is not None:
            yield started._replace(end_ns=max(started.end_ns, event.start_ns))
    yield from opened.values()


def _owner(programs: Mapping[str, Program], module: str, number: int, seen: set[str]) -> Program:
    """The program whose operations were seen. One that came out of the persistent cache has another number in its events than beside
    them, and several engines of a process have modules of one name: then the one that knows most of the operations."""
    named = [(name, program) for name, program in programs.items() if name.startswith(f"{module}(")]
    _, owner = max(named, key=lambda item: (len(seen & item[1].keys()), item[0] == f"{module}({number})"), default=("", {}))
    return owner


def stage_times(spans: Iterable[Span]) -> StageTimes:
    """Sums operations of steps; those of other programs are left out.

    Raises:
        BadRequestError: there is none.
    """
    ordered = sorted(span for span in spans if span.program.startswith(STEP_PREFIX))
    if not ordered:
        raise BadRequestError("no step ran while the trace was made")
    runs: dict[tuple[str, int], tuple[float, float]] = {}
    for span in ordered:
        first, last = runs.get((span.program, span.run), (span.start_ns, span.end_ns))
        runs[span.program, span.run] = (first, max(last, span.end_ns))
    seconds: dict[str, float] = defaultdict(float)
    for stage, nanoseconds in _by_stage(ordered, sorted(runs.values())).items():
        seconds[stage] = nanoseconds / 1e9
    programs: dict[str, tuple[int, float]] = {}
    for (program, _), (start_ns, end_ns) in runs.items():
        count, total_s = programs.get(program, (0, 0.0))
        programs[program] = (count + 1, total_s + (end_ns - start_ns) / 1e9)
    wall_ns = max(span.end_ns for span in ordered) - ordered[0].start_ns
    return StageTimes(len(runs), wall_ns / 1e9, dict(seconds), programs)


def _by_stage(ordered: list[Span], runs: list[tuple[float, float]]) -> dict[str, float]:
    """Nanoseconds by stage; `ordered` and `runs` begin with what starts first."""
    sums: dict[str, float] = defaultdict(float)
    running: dict[int, Span] = {}
    ends: list[tuple[float, int]] = []
    now_ns, next_run, busy_until_ns = ordered[0].start_ns, 0, -1.0

    def spend(until_ns: float) -> None:
        """Gives the time up to a moment, in which nothing begins or ends, to those that run."""
        nonlocal now_ns, next_run, busy_until_ns
        passed_ns = until_ns - now_ns
        if passed_ns > 0:
            leaves = [span for span in running.values() if not span.is_container]
            if leaves:
                for span in leaves:
                    sums[span.stage or NO_STAGE] += passed_ns / len(leaves)
            else:
                # Of loops around each other, the innermost began last.
                around = max(running.values(), default=None)
                while next_run < len(runs) and runs[next_run][0] <= now_ns:
                    busy_until_ns = max(busy_until_ns, runs[next_run][1])
                    next_run += 1
                name = IN_STEP if busy_until_ns > now_ns else BETWEEN_STEPS
                sums[around.stage or IN_STEP if around else name] += passed_ns
            now_ns = until_ns

    for index, span in enumerate(ordered):
        while ends and ends[0][0] <= span.start_ns:
            end_ns, ended = heapq.heappop(ends)
            spend(end_ns)
            del running[ended]
        spend(span.start_ns)
        running[index] = span
        heapq.heappush(ends, (span.end_ns, index))
    while ends:
        end_ns, ended = heapq.heappop(ends)
        spend(end_ns)
        del running[ended]
    return sums


def table(times: StageTimes) -> str:
    """The sums as text: stages with the longest first, then programs."""
    per_step = 1000 / times.num_steps
    lines = [f"{f'Where a step spends its time ({times.num_steps} steps)':<40} {'ms/step':>9} {'seconds':>9} {'share':>7}"]

    def line(name: str, seconds: float) -> None:
        lines.append(f"{name:<40} {seconds * per_step:>9.3f} {seconds:>9.3f} {seconds / times.wall_s:>7.1%}")

    for name, seconds in sorted(times.stages.items(), key=lambda item: -item[1]):
        line(name, seconds)
    line("together", times.wall_s)
    lines += ["", f"{'By bucket of tokens':<40} {'ms/step':>9} {'steps':>9} {'share':>7}"]
    for name, (count, seconds) in sorted(times.programs.items(), key=lambda item: int(item[0].removeprefix(STEP_PREFIX))):
        lines.append(f"{name.removeprefix(STEP_PREFIX):<40} {1000 * seconds / count:>9.3f} {count:>9} {seconds / times.wall_s:>7.1%}")
    return "\n".join(lines)


def figures(times: StageTimes) -> dict[str, Any]:
    """The sums for the JSON line: seconds by stage, steps and seconds by bucket."""
    buckets = {
        name.removeprefix(STEP_PREFIX): {"steps": count, "seconds": seconds} for name, (count, seconds) in sorted(times.programs.items())
    }
    return {"num_steps": times.num_steps, "wall_s": times.wall_s, "stages_s": times.stages, "buckets": buckets}
