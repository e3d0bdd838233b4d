"""The state machine is checked: each of these bugs of the page manager, planted one at a time, must be noticed."""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.page_machine import PageMachine
from tests.scheduler.planted_page_bugs import PAGE_BUGS, Plant


# Any seed finds every bug within 300 lives; this one does within a few.
@seed(11)
class SeededMachine(PageMachine):
    """The machine with the same lives in every run."""


@pytest.mark.parametrize("plant", PAGE_BUGS, ids=lambda plant: plant.__name__)
def test_state_machine_notices(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            SeededMachine,
            settings=settings(
                max_examples=300,
                stateful_step_count=50,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
