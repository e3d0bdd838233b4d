"""The simulation is checked: each of these bugs, planted one at a time, must be noticed."""

import pytest

from tests.scheduler.planted_scheduler_bugs import SCHEDULER_BUGS, PlantedBug
from tests.scheduler.worlds import simulate


def test_there_are_enough_bugs_and_every_recorded_world_is_sound_without_one() -> None:
    assert len(SCHEDULER_BUGS) >= 20
    for seed in sorted({bug.seed for bug in SCHEDULER_BUGS}):
        simulate(seed)


@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.plant.__name__)
def test_its_world_notices(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        simulate(bug.seed)


@pytest.mark.tier("long", area="pages")
@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_search_notices(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(10_000, 13_000):
            simulate(seed)
