"""The twelve invariants of the page manager, over random lives of small pools."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.page_machine import PageMachine


def run_machine(num_lives: int, num_rules: int) -> None:
    run_state_machine_as_test(
        PageMachine,
        settings=settings(
            max_examples=num_lives,
            stateful_step_count=num_rules,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_twelve_invariants_hold_after_every_rule() -> None:
    run_machine(200, 50)


@pytest.mark.tier("long", area="pages")
@pytest.mark.timeout(3600)
def test_twelve_invariants_hold_in_many_lives() -> None:
    run_machine(10_000, 100)
