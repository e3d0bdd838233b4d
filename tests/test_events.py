"""Events as lines: `from_line` is the exact inverse of `to_line`, lines are single and small."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import events
from jaxpaged.events import EngineLoad, Event, from_line, to_line

finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = {
    str: texts,
    int: st.integers(-(2**63), 2**63 - 1),
    float: finite,
    bool: st.booleans(),
    float | None: st.none() | finite,
    str | None: st.none() | texts,
    EngineLoad | None: st.none() | st.builds(EngineLoad, **dict.fromkeys(EngineLoad.__struct_fields__, st.integers(0, 2**63 - 1))),
    tuple[int, ...]: st.lists(st.integers(0, 2**63 - 1), max_size=12).map(tuple),
    tuple[str, ...]: st.lists(texts, max_size=4).map(tuple),
}


def event_strategy() -> st.SearchStrategy[Event]:
    kinds = [st.builds(kind, **{field.name: VALUES[field.type] for field in msgspec.structs.fields(kind)}) for kind in get_args(Event)]
    return st.one_of(kinds)


@given(event_strategy())
def test_from_line_is_the_inverse_of_to_line(event: Event) -> None:
    line = to_line(event)
    assert from_line(line) == event
    assert to_line(from_line(line)) == line
    assert b"\n" not in line
    assert b"\r" not in line


def test_every_event_names_itself() -> None:
    for kind in get_args(Event):
        samples = {str: "a", int: 1, float: 0.5, bool: True, float | None: None, str | None: None}
        samples |= {EngineLoad | None: EngineLoad(1, 2, 3, 4, 5), tuple[int, ...]: (1, 2), tuple[str, ...]: ("a", "b")}
        event = kind(**{field.name: samples[field.type] for field in msgspec.structs.fields(kind)})
        assert to_line(event).startswith(b'{"event":"' + kind.__name__.encode() + b'"')
        assert type(from_line(to_line(event))) is kind


def full_step() -> events.StepFinished:
    """A step of 256 rows with every number as wide as it gets."""
    seconds = 0.123456789012345678
    return events.StepFinished(
        time_s=1764472392.1234567,
        step=10**12,
        bucket_tokens=65536,
        num_tokens=65535,
        num_prefill_tokens=65279,
        num_decode_tokens=256,
        num_seqs=256,
        num_running=4096,
        num_waiting=10**6,
        num_preempted=256,
        num_pages_total=10**8,
        num_pages_in_use=10**8,
        num_pages_cached=10**8,
        schedule_s=seconds,
        pack_s=seconds,
        device_s=seconds,
        update_s=seconds,
        detokenize_s=seconds,
        prefix_queries_tokens=10**9,
        prefix_hits_tokens=10**9,
        prefill_recompute_tokens=10**9,
        token_gaps=(256,) * (len(events.TOKEN_GAP_BOUNDS_S) + 1),
        token_gaps_s=1234.123456789,
        decision="256 decodes, 1 chunk, 8 admitted, 256 preempted, 1000000 wait for pages",
    )


def test_the_line_of_a_step_with_256_rows_is_under_1_kb() -> None:
    assert len(to_line(full_step())) < 1000


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b'{"event":"Nothing","time_s":1}', b'{"event":"EngineStopped"}', b'{"event":"EngineStopped","time_s":"x"}', b"\xff"],
)
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        from_line(line)


def test_events_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        full_step().step = 2  # type: ignore[misc]
