"""The twelve invariants of the page manager, over random lives of small pools."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.page_machine import PageMachine


def test_twelve_invariants_hold_after_every_rule() -> None:
    run_state_machine_as_test(
        PageMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
