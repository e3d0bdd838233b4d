"""Where times come from."""

import time
from collections.abc import Callable
from typing import NamedTuple


class Clocks(NamedTuple):
    """`monotonic` measures, `wall` labels events for people; both in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


REAL_CLOCKS = Clocks()
