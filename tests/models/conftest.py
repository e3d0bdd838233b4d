"""What the models' tests share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def quick_programs() -> Iterator[None]:
    """For tests that run tiny models on runners: compiling takes most of their seconds."""
    from tests.quick_programs import quick_runners  # late: not every test here imports jax

    with quick_runners():
        yield
