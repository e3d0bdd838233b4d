"""The simulation is checked: each of these bugs, planted one at a time, must be noticed."""

import pytest

from tests.scheduler.planted_scheduler_bugs import SCHEDULER_BUGS, PlantedBug
from tests.scheduler.test_random_worlds import NUM_WORLDS
from tests.scheduler.worlds import simulate

NOTICED = (AssertionError, IndexError)
"""A check failed, or the engine fell over its own books. Other errors are a bug that does not fit the code any more."""

SEARCHED = range(10_000, 13_000)
"""Seeds of the long search, none of which was looked at when the bugs were planted."""


def test_there_are_enough_bugs_and_every_recorded_world_is_sound_without_one() -> None:
    assert len(SCHEDULER_BUGS) >= 20
    assert len({bug.plant.__name__ for bug in SCHEDULER_BUGS}) == len(SCHEDULER_BUGS)
    assert not any(bug.seed in SEARCHED for bug in SCHEDULER_BUGS)
    # `test_random_worlds` runs them all.
    assert all(bug.seed < NUM_WORLDS for bug in SCHEDULER_BUGS)


@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.plant.__name__)
def test_its_world_notices(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(NOTICED):
        simulate(bug.seed)


@pytest.mark.tier("long", area="pages")
@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_search_notices(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(NOTICED):
        for seed in SEARCHED:
            simulate(seed)
