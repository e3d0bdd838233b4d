"""The phases of a start: they add up to its wall time."""

import pytest

from jaxpaged.bench.startup import FIRST_TOKEN, Mark, Run, ledger

MARKS: list[Mark] = [
    ("interpreter", 100.25, 0.125),
    ("load", 101.0, 0.75),
    ("compile", 103.5, 5.0),
    ("load", 104.0, 5.25),
    (FIRST_TOKEN, 104.5, 5.5),
    ("exit", 105.0, 6.0),
]
"""Of a start that began at 100 and comes to a phase a second time."""


def test_phases_add_up_to_the_wall_time_and_the_cpu_time() -> None:
    phases = ledger(100.0, MARKS)
    assert phases["load"] == (1.25, 0.875)
    assert tuple(map(sum, zip(*phases.values(), strict=True))) == (5.0, 6.0)


@pytest.mark.parametrize(("till_token", "column", "wanted"), [(True, 0, 4.5), (True, 1, 5.5), (False, 0, 5.0), (False, 1, 6.0)])
def test_totals_are_those_of_the_clock(till_token: bool, column: int, wanted: float) -> None:
    assert Run(ledger(100.0, MARKS), 1.0).total(column, till_token=till_token) == wanted
