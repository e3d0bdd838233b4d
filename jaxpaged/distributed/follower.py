"""Every process but the first: joins process 0, and is told by it what to do with the device.

When process 0 is gone, or silent, this one ends at once, whatever its device is doing: another process may be what that waits for.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

from jaxpaged.distributed.company import BEAT_S, DEAD_STATUS, SILENCE_S, START_SILENCE_S, TICK_S, Silence
from jaxpaged.distributed.frames import CALLS, TEXT_BYTES, TEXTS, Frame, FrameStream, Kind
from jaxpaged.distributed.handshake import introduce
from jaxpaged.distributed.listening import RETRY_S, connect
from jaxpaged.distributed.settings import Processes
from jaxpaged.errors import StreamError

_POLL_S = 0.25


class Follower:
    """Process 0, as one of the others has it. `join` comes first.

    Args:
        processes: with the index of this one.
        terms: what must be the same everywhere.
        on_death: told why the company is dead, once, from any thread; `leave` comes next.
        leave: ends the process with a status.
        tick_s: between two looks at whether process 0 lives.
    """

    def __init__(
        self,
        processes: Processes,
        terms: Mapping[str, str],
        *,
        on_death: Callable[[str], None],
        leave: Callable[[int], None] = os._exit,
        tick_s: float = TICK_S,
    ) -> None:
        self.processes = processes
        self._terms, self._on_death, self._leave, self._tick_s = terms, on_death, leave, tick_s
        self._stream: FrameStream | None = None
        self._sending = threading.Lock()
        self._values: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        """As many as process 0 may be ahead by: it waits for ids that are not there before this one has computed them, too."""
        self._silence = Silence(START_SILENCE_S, tick_s)
        self._ended = threading.Event()
        self._death: str | None = None
        self._lock = threading.Lock()

    @property
    def bind_host(self) -> str | None:
        """See `Company`."""
        return None

    @property
    def death(self) -> str | None:
        """Why the company is dead; None: it lives."""
        return self._death

    def join(self) -> None:
        """Comes to process 0.

        Raises:
            ConfigError: it does not want us, with its reason.
            StreamError: it is not there in time.
        """
        processes = self.processes
        deadline_s = time.monotonic() + processes.start_timeout_s
        while self._stream is None:
            connection = connect(processes.host, processes.steps_port, deadline_s)
            if connection is None:
                raise StreamError(
                    f"process 0 did not listen at port {processes.steps_port} of {processes.host} in {processes.start_timeout_s:g} s; "
                    "start it, or raise distributed.start_timeout_s"
                )
            try:
                self._stream = introduce(connection, processes, self._terms)
            except StreamError:  # it is at its end, or too many knock: once more
                connection.close()
                time.sleep(RETRY_S)
            except BaseException:
                connection.close()
                raise
        threading.Thread(target=self._hear, args=(self._stream,), name="jaxpaged-leader", daemon=True).start()
        threading.Thread(target=self._watch, name="jaxpaged-beat", daemon=True).start()

    def least(self, name: str, number: int) -> int:
        """See `Company`."""
        return int(self._meet(name, str(number)))

    def same(self, name: str, text: str) -> None:
        """See `Company`."""
        self._meet(name, text)

    def follow(self, call_bytes: Mapping[Kind, int]) -> None:
        """The start is over: calls come from now on, and a silence of `SILENCE_S` is a death.

        Args:
            call_bytes: of the largest frame of each kind.
        """
        assert self._stream is not None
        self._stream.most_bytes = lambda kind: TEXT_BYTES if kind in TEXTS else call_bytes.get(kind, 0)
        self._silence.limit_s = SILENCE_S

    def next_call(self) -> Frame:
        """Waits for what process 0 does next."""
        return self._calls.get()

    def fail(self, reason: str) -> None:
        """This process ends: process 0 is told why, and ends as well."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        with contextlib.suppress(OSError, StreamError):
            self._send(Kind.FAILED, reason.encode()[:1000])
        self._close()

    def close(self) -> None:
        """Process 0 has said STOP, and all is done."""
        with self._lock:
            self._ended.set()
        with contextlib.suppress(OSError, StreamError):
            self._send(Kind.BYE)
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _meet(self, name: str, text: str) -> str:
        try:
            self._send(Kind.VALUE, f"{name}={text}".encode())
        except OSError as error:
            self._die(f"process 0 is gone: {error.strerror or error}")
        while True:
            if self._death is not None:
                raise StreamError(self._death)
            try:
                said, _, value = self._values.get(timeout=_POLL_S).partition("=")
            except queue.Empty:
                continue
            if said != name:
                raise StreamError(f"process 0 is at {said[:40]!r} where this one is at {name!r}")
            return value

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        if self._stream is None:
            raise StreamError("there is no connection to process 0")
        with self._sending:
            self._stream.send(kind, payload)

    def _hear(self, stream: FrameStream) -> None:
        try:
            while True:
                frame = stream.receive()
                self._silence.broken()
                if frame.kind in CALLS:
                    self._calls.put(frame)
                elif frame.kind is Kind.VALUE:
                    self._values.put(frame.text)
                elif frame.kind is Kind.FAILED:
                    self._die(f"process 0 has ended: {frame.text}")
                elif frame.kind is not Kind.BEAT:
                    raise StreamError(f"it sends {frame.kind.name}, which others do")
        except StreamError as error:
            self._die(f"process 0 is gone: {error}")

    def _watch(self) -> None:
        num_ticks = 0
        while not self._ended.wait(self._tick_s):
            num_ticks += 1
            if self._silence.tick():
                self._die(f"process 0 was not heard of for {self._silence.limit_s:g} s")
            elif num_ticks % max(1, round(BEAT_S / self._tick_s)) == 0:
                with contextlib.suppress(OSError, StreamError):  # that it is gone is heard by the reader
                    self._send(Kind.BEAT)

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._death = reason
            self._ended.set()
        try:
            self._on_death(reason)
        finally:
            self._leave(DEAD_STATUS)
        self._close()
