"""Process 0 and another one in two threads of one process, over the loopback."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jaxpaged.distributed.follower import Follower
from jaxpaged.distributed.leader import Leader
from jaxpaged.distributed.settings import Processes

SECRET = b"0123456789abcdef"
TERMS = {"cache.page_size": "16", "the mesh": "tensor 2"}
TICK_S = 0.02
PATIENCE_S = 60.0


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def processes(index: int, ports: tuple[int, int], *, number: int = 2, secret: bytes = SECRET, start_timeout_s: float = 60.0) -> Processes:
    """Of the loopback."""
    return Processes("127.0.0.1", ports[0], ports[1], number, index, secret, start_timeout_s)


class End:
    """What becomes of a process: the reason of its company's death, and its exit status."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.statuses: list[int] = []
        self.is_dead, self.has_left = threading.Event(), threading.Event()

    def die(self, reason: str) -> None:
        """For `on_death`."""
        self.reasons.append(reason)
        self.is_dead.set()

    def leave(self, status: int) -> None:
        """For `leave`."""
        self.statuses.append(status)
        self.has_left.set()

    def reason(self) -> str:
        """Waits for the death."""
        assert self.is_dead.wait(PATIENCE_S)
        (only,) = self.reasons
        return only

    def status(self) -> int:
        """Waits for the end."""
        assert self.has_left.wait(PATIENCE_S)
        (only,) = self.statuses
        return only


class Company:
    """Process 0, which waits for the others as soon as `begin` was called."""

    def __init__(self, number: int = 2, *, terms: Mapping[str, str] = TERMS) -> None:
        self.ports, self.number = free_ports(), number
        self.end = End()
        self.said: list[str] = []
        self.leader = Leader(processes(0, self.ports, number=number), terms, leave=self.end.leave, tick_s=TICK_S)
        self.leader.listen()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._join)

    def begin(self) -> None:
        """Has process 0 wait for the others."""
        self._thread.start()

    def joined(self) -> Leader:
        """Process 0, once all have come; raises what its waiting raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.leader

    def follower(self, index: int = 1, *, terms: Mapping[str, str] = TERMS, secret: bytes = SECRET) -> tuple[Follower, End]:
        """Another one, which has not joined yet."""
        end = End()
        own = processes(index, self.ports, number=self.number, secret=secret)
        return Follower(own, terms, on_death=end.die, leave=end.leave, tick_s=TICK_S), end

    def _join(self) -> None:
        try:
            self.leader.join(self.said.append, self.end.die)
        except BaseException as error:
            self.error = error


@contextmanager
def company(number: int = 2, *, terms: Mapping[str, str] = TERMS) -> Iterator[Company]:
    """One that is gone at the end."""
    made = Company(number, terms=terms)
    made.begin()
    try:
        yield made
    finally:
        made.leader.fail("the test is over")


@contextmanager
def pair() -> Iterator[tuple[Company, Leader, Follower, End]]:
    """Process 0 and process 1, joined."""
    with company() as made:
        follower, end = made.follower()
        follower.join()
        try:
            yield made, made.joined(), follower, end
        finally:
            follower.fail("the test is over")
