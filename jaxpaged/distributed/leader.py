"""Process 0: waits for the others, hands out what it does with the device, and ends when one of them does."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

from jaxpaged.distributed.company import BEAT_S, DEAD_STATUS, SILENCE_S, START_SILENCE_S, TICK_S, Silence
from jaxpaged.distributed.frames import FrameStream, Kind
from jaxpaged.distributed.handshake import Hello, Visitor, receive_visitor
from jaxpaged.distributed.listening import listen
from jaxpaged.distributed.settings import Processes
from jaxpaged.distributed.terms import difference
from jaxpaged.errors import ConfigError, StreamError

MORE_VISITORS = 16
"""Connections beside those of the processes that may be in the middle of their handshake."""
BYE_S = 1.5
"""For the others to end in order."""
LEAVE_S = 4.0
"""After a death the process ends within this time, whatever hangs; where an engine serves, its watchdog is quicker."""
_POLL_S = 0.25


class _Peer:
    """One other process."""

    def __init__(self, index: int, stream: FrameStream, tick_s: float) -> None:
        self.index, self.stream = index, stream
        self.values: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said_bye = threading.Event()
        self.silence = Silence(START_SILENCE_S, tick_s)
        self._sending = threading.Lock()

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Raises OSError."""
        with self._sending:
            self.stream.send(kind, *parts)

    def beat(self) -> None:
        """A sign of life, unless something is being sent, which is one."""
        if self._sending.acquire(blocking=False):
            try:
                self.stream.send(Kind.BEAT)
            finally:
                self._sending.release()


class Leader:
    """The others, as process 0 has them. `listen` and `join` come first.

    Args:
        processes: with index 0.
        terms: what must be the same everywhere.
        leave: ends the process with a status.
        tick_s: between two looks at whether the others live.
    """

    def __init__(
        self, processes: Processes, terms: Mapping[str, str], *, leave: Callable[[int], None] = os._exit, tick_s: float = TICK_S
    ) -> None:
        self.processes = processes
        self._terms, self._leave, self._tick_s = terms, leave, tick_s
        self._listener: socket.socket | None = None
        self._bound: str | None = None
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._num_visitors = 0
        self._death: str | None = None
        self._is_closing = False
        self._ended = threading.Event()
        self._on_death: Callable[[str], None] = lambda reason: None
        self._say: Callable[[str], None] = lambda message: None

    @property
    def bind_host(self) -> str | None:
        """See `Company`."""
        return self._bound

    @property
    def death(self) -> str | None:
        """Why the company is dead; None: it lives."""
        return self._death

    def listen(self) -> None:
        """Takes the port. Raises ConfigError when it cannot be had, or the coordinator's."""
        processes = self.processes
        listen(processes.host, processes.coordinator_port, param="distributed.coordinator").close()
        self._listener = listen(processes.host, processes.steps_port, param="distributed.port")
        self._bound = str(self._listener.getsockname()[0])

    def join(self, say: Callable[[str], None], on_death: Callable[[str], None]) -> None:
        """Waits for all of the others.

        Args:
            say: told how many have come, and who was turned away and why.
            on_death: told why the company is dead, once, from any thread.

        Raises:
            StreamError: they did not come in time, or one left again.
        """
        assert self._listener is not None
        self._on_death, self._say = on_death, say
        threading.Thread(target=self._watch, name="jaxpaged-peers", daemon=True).start()
        deadline_s = time.monotonic() + self.processes.start_timeout_s
        self._listener.settimeout(_POLL_S)
        self._say_who_is_missing()
        while (missing := self._missing()) and self._death is None:
            if time.monotonic() > deadline_s:
                raise StreamError(
                    f"{_named(missing)} did not come in {self.processes.start_timeout_s:g} s; start all processes, or raise "
                    "distributed.start_timeout_s"
                )
            try:
                self._let_in(self._listener.accept()[0])
            except TimeoutError:
                continue
            except OSError as error:  # the door was closed, by a death
                self.check()
                raise StreamError(f"process 0 cannot be reached any more: {error.strerror or error}") from error
        # Nobody else is waited for: the port is free again.
        self._close_door()
        self.check()

    def least(self, name: str, number: int) -> int:
        """See `Company`."""
        least = min(number, *(int(text) for _, text in self._values(name)))
        self._answer(name, str(least))
        return least

    def same(self, name: str, text: str) -> None:
        """See `Company`."""
        for index, theirs in self._values(name):
            if theirs != text:
                raise ConfigError(f"{name} of process {index} are not those of process 0: give all processes the same files and devices")
        self._answer(name, text)

    def serve(self) -> None:
        """The start is over: from now on a silence of `SILENCE_S` is a death."""
        for peer in self._peers.values():
            peer.silence.limit_s = SILENCE_S

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Has all others do what this one is about to do. Raises StreamError when one of them is gone."""
        self.check()
        for peer in self._peers.values():
            try:
                peer.send(kind, *parts)
            except OSError as error:
                self._die(f"process {peer.index} is gone: {error.strerror or error}")
                self.check()

    def check(self) -> None:
        """Raises StreamError when the company is dead."""
        if self._death is not None:
            raise StreamError(self._death)

    def fail(self, reason: str) -> None:
        """This process ends: the others are told why, and end as well. A second call does nothing."""
        if self._is_closing or self._death is not None:
            return
        self._is_closing = True
        self._part(reason)

    def close(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Has the others end in order, and waits for that for a while; a second call does nothing.

        Args:
            meanwhile: what this process does to its own end.
        """
        if self._is_closing or self._death is not None:
            meanwhile()
            return
        self._is_closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(Kind.STOP)
        meanwhile()
        deadline_s = time.monotonic() + BYE_S
        for peer in self._peers.values():
            peer.said_bye.wait(max(0.0, deadline_s - time.monotonic()))
        self._ended.set()
        for peer in self._peers.values():
            peer.stream.close()
        self._close_door()

    def _close_door(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _let_in(self, connection: socket.socket) -> None:
        with self._changed:
            if self._num_visitors >= self.processes.number + MORE_VISITORS:
                connection.close()
                return
            self._num_visitors += 1
        threading.Thread(target=self._receive_visitor, args=(connection,), name="jaxpaged-visitor", daemon=True).start()

    def _receive_visitor(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor = receive_visitor(connection, self.processes.secret)
            self._admit(visitor)
        except (StreamError, OSError) as error:
            if self._missing():  # else the start has gone on
                self._say(f"somebody was turned away: {error}")
            connection.close()
        finally:
            with self._changed:
                self._num_visitors -= 1

    def _admit(self, visitor: Visitor) -> None:
        hello, stream = visitor.hello, visitor.stream
        with self._changed:
            refusal = self._refusal(hello)
            if refusal is None:
                peer = self._peers[hello.index] = _Peer(hello.index, stream, self._tick_s)
                peer.send(Kind.WELCOME)
        if refusal is not None:
            stream.send(Kind.REFUSED, refusal.encode())
            stream.close()
            self._say(f"process {hello.index} was turned away: {refusal}")
            return
        threading.Thread(target=self._hear, args=(peer,), name=f"jaxpaged-peer-{peer.index}", daemon=True).start()
        self._say_who_is_missing()

    def _refusal(self, hello: Hello) -> str | None:
        number = self.processes.number
        if hello.number != number:
            return f"it says that there are {hello.number} processes, and process 0 that there are {number}"
        if not 1 <= hello.index < number:
            return f"there is no process {hello.index} of {number} beside process 0"
        if hello.index in self._peers:
            return f"process {hello.index} is here already"
        return difference(self._terms, hello.terms, hello.index)

    def _missing(self) -> list[int]:
        with self._changed:
            return [index for index in range(1, self.processes.number) if index not in self._peers]

    def _say_who_is_missing(self) -> None:
        missing = self._missing()
        self._say(f"waiting for {_named(missing)}" if missing else f"all {self.processes.number} processes are here")

    def _values(self, name: str) -> list[tuple[int, str]]:
        return [(peer.index, self._value(peer, name)) for peer in self._peers.values()]

    def _value(self, peer: _Peer, name: str) -> str:
        while True:
            self.check()
            try:
                said, _, text = peer.values.get(timeout=_POLL_S).partition("=")
            except queue.Empty:
                continue
            if said != name:
                raise StreamError(f"process {peer.index} is at {said[:40]!r} where process 0 is at {name!r}")
            return text

    def _answer(self, name: str, text: str) -> None:
        self.send(Kind.VALUE, f"{name}={text}".encode())

    def _hear(self, peer: _Peer) -> None:
        """What one of the others says, until it ends."""
        try:
            while True:
                frame = peer.stream.receive()
                peer.silence.broken()
                if frame.kind is Kind.VALUE:
                    peer.values.put(frame.text)
                elif frame.kind is Kind.BYE:
                    peer.said_bye.set()
                elif frame.kind is Kind.FAILED:
                    raise StreamError(f"process {peer.index} has ended: {frame.text}")
                elif frame.kind is not Kind.BEAT:
                    raise StreamError(f"process {peer.index} sends {frame.kind.name}, which is process 0's to send")
        except StreamError as error:
            text = str(error)
            peer.said_bye.set()
            self._die(text if text.startswith("process ") else f"process {peer.index} is gone: {text}")

    def _watch(self) -> None:
        """Signs of life, both ways."""
        num_ticks = 0
        while not self._ended.wait(self._tick_s) and self._death is None:
            num_ticks += 1
            with self._changed:
                peers = list(self._peers.values())
            for peer in peers:
                if peer.silence.tick():
                    self._die(f"process {peer.index} was not heard of for {peer.silence.limit_s:g} s")
                    return
                if num_ticks % max(1, round(BEAT_S / self._tick_s)) == 0:
                    with contextlib.suppress(OSError):  # whoever is gone is heard of by its reader
                        peer.beat()

    def _die(self, reason: str) -> None:
        with self._changed:
            if self._death is not None or self._is_closing:
                return
            self._death = reason
        try:
            self._on_death(reason)
        finally:
            self._part(reason)
            leaving = threading.Timer(LEAVE_S, self._leave, (DEAD_STATUS,))
            leaving.daemon = True
            leaving.start()

    def _part(self, reason: str) -> None:
        """Tells who can be told, and ends all connections, which wakes whoever is stuck in one."""
        self._ended.set()
        for peer in self._peers.values():
            teller = threading.Thread(target=_tell_end, args=(peer, reason), daemon=True)
            teller.start()
            teller.join(_POLL_S)
        for peer in self._peers.values():
            peer.stream.close()
        self._close_door()


def _tell_end(peer: _Peer, reason: str) -> None:
    with contextlib.suppress(OSError):
        peer.send(Kind.FAILED, reason.encode()[:1000])


def _named(indices: list[int]) -> str:
    if len(indices) <= 8:
        return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
    return f"{len(indices)} processes"
