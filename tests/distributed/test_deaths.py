"""Who ends whom: a process that leaves, fails, is silent or talks out of turn ends the others, with a reason and status 70."""

import threading

import pytest

from jaxpaged.distributed import follower as followers
from jaxpaged.distributed import leader as leaders
from jaxpaged.distributed.company import Silence
from jaxpaged.distributed.frames import Kind
from jaxpaged.errors import ConfigError, StreamError
from tests.distributed.company import company, pair


def test_process_0_fails() -> None:
    with pair() as (_, leader, follower, end):
        leader.fail("the device is on fire")
        assert end.reason() == "process 0 has ended: the device is on fire"
        assert end.status() == 70
        assert follower.death is not None


def test_another_one_fails_and_the_third_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "LEAVE_S", 0.05)
    with company(number=3) as made:
        (one, _), (two, end_of_two) = made.follower(1), made.follower(2)
        one.join()
        two.join()
        leader = made.joined()
        one.fail("process 1: no room")
        assert made.end.reason() == "process 1 has ended: process 1: no room"
        assert end_of_two.reason() == "process 0 has ended: process 1 has ended: process 1: no room"
        assert end_of_two.status() == 70
        with pytest.raises(StreamError, match="no room"):
            leader.send(Kind.RUN, b"")
        assert made.end.status() == 70, "whatever hangs in process 0"


def test_a_connection_that_breaks_is_a_death_on_both_sides() -> None:
    with pair() as (made, leader, follower, end):
        follower._close()
        assert made.end.reason().startswith("process 1 is gone: the connection")
        assert end.reason().startswith("process 0 is gone: the connection")
        assert leader.death == made.end.reasons[0]


def test_silence_is_a_death_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody beats here; at the start they wait for longer."""
    monkeypatch.setattr(leaders, "BEAT_S", 1e9)
    monkeypatch.setattr(followers, "BEAT_S", 1e9)
    monkeypatch.setattr(leaders, "SILENCE_S", 0.1)
    monkeypatch.setattr(followers, "SILENCE_S", 0.1)
    with pair() as (made, leader, _, _end):
        assert not made.end.is_dead.wait(0.5)
        leader.serve()
        assert made.end.reason() == "process 1 was not heard of for 0.1 s"
    with pair() as (_made, _, follower, end):
        follower.follow({})
        assert end.reason() == "process 0 was not heard of for 0.1 s"
        assert end.status() == 70


def test_beats_keep_them_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks go on for ten times the limit."""
    monkeypatch.setattr(leaders, "BEAT_S", 0.02)
    monkeypatch.setattr(followers, "BEAT_S", 0.02)
    ticks = {"process 1": 0, "process 0": 0}
    with pair() as (made, leader, follower, end):
        for name, silence in (("process 1", leader._peers[1].silence), ("process 0", follower._silence)):
            real_tick = silence.tick

            def tick(name: str = name, real_tick: object = real_tick) -> bool:
                ticks[name] += 1
                assert callable(real_tick)
                return bool(real_tick())

            silence.tick = tick  # type: ignore[method-assign]
            silence.limit_s = 2.0
        while min(ticks.values()) < 110:  # the limit is 100
            assert not made.end.is_dead.wait(0.02)
            assert not end.is_dead.is_set()


def test_ticks_are_counted_and_no_clock_is_looked_at() -> None:
    silence = Silence(2.0, tick_s=0.5)
    assert [silence.tick() for _ in range(5)] == [False] * 4 + [True]
    silence.broken()
    assert not silence.tick()


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.STOP, Kind.WELCOME])
def test_what_process_0_alone_may_send(kind: Kind) -> None:
    with pair() as (made, _, follower, _end):
        follower._send(kind)
        assert made.end.reason() == f"process 1 sends {kind.name}, which is process 0's to send"


def test_calls_before_the_start_is_over_are_short_and_bounded_afterwards() -> None:
    with pair() as (made, leader, follower, end):
        follower.follow({Kind.RUN: 100})
        leader.send(Kind.RUN, bytes(100))
        assert follower.next_call().payload == bytes(100)
        leader.send(Kind.RUN, bytes(101))
        assert end.reason() == "process 0 is gone: a frame RUN of 101 bytes is too long"


def test_different_files_are_refused_where_they_meet() -> None:
    with pair() as (_, leader, follower, end):
        thread = threading.Thread(target=lambda: pytest.raises(StreamError, follower.same, "model", "theirs"))
        thread.start()
        with pytest.raises(ConfigError, match="model of process 1 are not those of process 0"):
            leader.same("model", "ours")
        leader.fail("another model")
        assert end.reason() == "process 0 has ended: another model"
        thread.join()


def test_an_orderly_end_is_no_death() -> None:
    with pair() as (made, leader, follower, end):
        done: list[str] = []
        thread = threading.Thread(target=leader.close, args=(lambda: done.append("own end"),))
        thread.start()
        assert follower.next_call().kind is Kind.STOP
        follower.close()
        thread.join()
        assert done == ["own end"]
        leader.close(lambda: done.append("again"))
        leader.fail("never told")
        follower.fail("never told")
        assert (made.end.reasons, end.reasons, end.statuses) == ([], [], [])


def test_a_process_that_does_not_say_goodbye_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "BYE_S", 0.05)
    with pair() as (made, leader, *_):
        leader.close()
        assert made.end.reasons == []


def test_one_that_left_before_the_others_came() -> None:
    with company(number=3) as made:
        first, _ = made.follower(1)
        first.join()
        first.fail("a bad option")
        with pytest.raises(StreamError, match="process 1 has ended: a bad option"):
            made.joined()
