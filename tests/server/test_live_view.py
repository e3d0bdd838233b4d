"""What the live page is told, from events alone: the same verdict as of the log, points that add up, and requests in their phases."""

import json
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.scrapes import Scrape
from server.dashboard.frames import MAX_POINTS, NUM_REPEATED, TIMELINE_S, FrameMaker, Present
from server.dashboard.live_view import KEPT_S, LiveView
from server.dashboard.timeline import MAX_ENDED, MAX_ROWS
from server.prometheus_sink import PrometheusSink
from tests.observability.driven import World
from tests.observability.samples import START_S, finished, scheduled, step
from tests.observability.states import STATES, Trace, healthy
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax


class Page:
    """What somebody would see who opens the page after some events."""

    def __init__(self, trace: Trace) -> None:
        self.figures = PrometheusSink()
        self.live = LiveView(self.figures.scrape)
        self.maker = FrameMaker(self.live, DiagnoseConfig())
        self.take(trace)

    def take(self, trace: Trace) -> None:
        for event in trace:
            self.live(event)
            self.figures(event)

    def frame(self, now_s: float) -> dict[str, Any]:
        present = Present(time_s=now_s, phase="ready", message="", running=0, waiting=0, pool=0.0, viewers=1, model="m", names={})
        told: dict[str, Any] = json.loads(self.maker.frame(present, None).partition(b"data: ")[2])
        return told

    def history(self, now_s: float) -> list[dict[str, Any]]:
        points: list[dict[str, Any]] = json.loads(self.maker.history(now_s).partition(b"data: ")[2])["points"]
        return points


@pytest.mark.parametrize("name", ["row_limit", "pool_full", "device_bound", "healthy"])
def test_the_verdict_is_that_of_the_log(name: str) -> None:
    trace = (healthy if name == "healthy" else STATES[name][0])(byte_level(), 1)
    verdict = Page(trace).frame(trace[-1].time_s + 0.1)["verdict"]
    if name == "healthy":
        assert verdict == {"state": "healthy", "findings": []}
        return
    first = verdict["findings"][0]
    assert (verdict["state"], first["id"]) == ("found", name)
    assert first["title"]
    assert first["remedy"]
    assert first["evidence"][0].keys() >= {"metric", "value", "unit", "threshold"}
    assert len(verdict["findings"]) <= 3


def test_nothing_to_judge_is_no_health() -> None:
    page = Page([])
    assert page.frame(START_S)["verdict"]["state"] == "early"
    states = [page.frame(START_S + second)["verdict"]["state"] for second in range(1, 8)]
    assert states[-1] == "idle"


def test_points_add_up_to_all_tokens() -> None:
    world = World(byte_level(), step_s=0.1, num_pages=400)
    world.clients(6, 20.0, (10, 20), (20, 30))
    trace = world.run(60.0)
    page = Page(trace)
    now_s = trace[-1].time_s + 3
    page.frame(now_s)
    points = page.history(now_s)
    told = sum(
        point["answers"] * (point["at_s"] - before) for before, point in zip([START_S, *(p["at_s"] for p in points)], points, strict=False)
    )
    made = sum(event.num_output_tokens for event in trace if isinstance(event, events.StepFinished))
    assert told == pytest.approx(made)
    busy = [point for point in points if point["batch"]]
    assert all(0 <= point["padding"] < 1 and 0 < point["device"] <= 1 for point in busy)
    p50, p95, p99 = busy[-1]["gap"]
    assert 0.05 < p50 <= p95 <= p99 < 0.3
    assert busy[-1]["first_token"][0] >= 0.1
    assert points[-1]["batch"] is None, "nothing ran in the last second"


def test_an_old_viewer_and_a_new_one_know_the_same_points() -> None:
    page = Page([])
    known: dict[float, Any] = {}
    for second in range(40):
        page.take([step(0.5 + second, second)])
        known |= {point["at_s"]: point for point in page.frame(START_S + second + 0.6)["points"]}
    history = page.history(START_S + 40)
    assert {point["at_s"]: point for point in history} == known
    assert len(known) == 39
    assert len(page.frame(START_S + 41)["points"]) == NUM_REPEATED


def test_what_is_kept_is_bounded_and_a_clock_may_be_set() -> None:
    page = Page([])
    for second in range(3 * int(KEPT_S)):
        page.take([step(float(second), second)])
    page.frame(START_S + 3 * KEPT_S)
    assert len(page.history(START_S + 3 * KEPT_S)) <= MAX_POINTS
    assert len(page.live.scrapes()) <= KEPT_S + 2
    page.take([step(-5000.0 + second, second) for second in range(5)])
    assert [scrape.at_s - START_S for scrape in page.live.scrapes()] == [-5000.0, -4999.0, -4998.0, -4997.0, -4996.0]
    assert len(page.frame(START_S - 4996)["points"]) == 4
    page.take([step(9000.0, 1), step(9001.0, 2)])
    assert [scrape.at_s - START_S for scrape in page.live.scrapes()] == [9000.0, 9001.0]


def test_a_pause_is_a_point_of_its_own() -> None:
    page = Page([step(0.0, 1), step(0.4, 2), step(30.0, 3)])
    assert [scrape.at_s - START_S for scrape in page.live.scrapes()] == [0.0, 1.0, 30.0]
    steps = [scrape.values["jaxpaged_steps_total", ()] for scrape in page.live.scrapes()]
    assert steps == [0.0, 2.0, 2.0], "what happened did so in its second"


def test_figures_are_taken_once_a_second_whatever_comes() -> None:
    taken: list[float] = []

    def scrape(at_s: float) -> Scrape:
        taken.append(at_s)
        return Scrape(at_s, {}, {})

    live = LiveView(scrape)
    for number in range(5000):
        live(step(number / 1000, number))
    assert len(taken) == 5


def queued(name: str, at_s: float) -> events.RequestQueued:
    return events.RequestQueued(time_s=START_S + at_s, request_id=name, num_prompt_tokens=7, max_tokens=5, num_waiting=1)


def test_a_request_in_its_phases() -> None:
    page = Page([queued("a", 1.0)])

    def row(now: float) -> dict[str, Any]:
        (one,) = page.frame(START_S + now)["requests"]
        return dict(one)

    assert (row(1.1)["scheduled_s"], row(1.1)["reason"]) == (None, "")
    page.take([scheduled("a", 2.0), events.RequestFirstToken(time_s=START_S + 3, request_id="a", ttft_s=2.0)])
    page.take([events.RequestPreempted(time_s=START_S + 4, request_id="a", num_pages_freed=1, num_computed_tokens=9), scheduled("a", 5.0)])
    told = row(5.0)
    assert [told[name] - START_S for name in ("queued_s", "scheduled_s", "first_token_s")] == [1.0, 2.0, 3.0]
    assert [at_s - START_S for at_s in told["preempted_s"]] == [4.0]
    page.take([finished("a", 6.0)])
    assert (row(7.0)["finished_s"], row(7.0)["reason"]) == (START_S + 6, "stop")
    assert page.frame(START_S + 7 + TIMELINE_S)["requests"] == []


def test_rows_are_bounded_and_those_that_run_come_before_those_that_wait() -> None:
    page = Page([queued(f"w{number}", number / 1000) for number in range(10_000)])
    page.take([scheduled(f"w{number}", 20.0) for number in range(9_990, 10_000)])
    page.take([event for number in range(300) for event in (queued(f"e{number}", 21.0), finished(f"e{number}", 22.0))])
    rows = page.frame(START_S + 23)["requests"]
    assert len(rows) == MAX_ROWS
    assert {row["id"] for row in rows} >= {f"w{number}" for number in range(9_990, 10_000)}
    assert {row["id"] for row in rows if row["reason"]} == {f"e{number}" for number in range(290, 300)}
    assert len(page.live._timeline._ended) == MAX_ENDED
    page.take([finished(f"w{number}", 24.0) for number in range(10_000)])
    assert not page.live._timeline._open


def test_a_long_name_is_cut() -> None:
    page = Page([queued("x" * 5000, 1.0)])
    (row,) = page.frame(START_S + 1.1)["requests"]
    assert len(row["id"]) == 80
