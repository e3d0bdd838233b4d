"""Where lines of a log go: an open descriptor, or a file that is rotated. Used by one writer thread."""

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxpaged.errors import ConfigError

STDERR_FD = 2


@runtime_checkable
class Target(Protocol):
    """Something that takes lines."""

    def write(self, lines: Sequence[bytes]) -> int:
        """Writes whole lines in order and returns how many are out; raises OSError only when not one is."""
        ...

    def stop_waiting(self) -> None:
        """Makes a write that waits for a slow reader give up, where that is possible."""
        ...

    def close(self) -> None: ...


class StreamTarget:
    """An open descriptor, such as standard error; it is not closed. A reader that is gone is not tried again.

    Args:
        fd: file descriptor, blocking or not.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._torn = b""
        self._broken: OSError | None = None
        self._closing = threading.Event()

    def write(self, lines: Sequence[bytes]) -> int:
        """See `Target.write`; blocks while the reader is slow."""
        if self._broken is not None:
            raise self._broken
        try:
            # What is left of a line that was cut by an error comes first, or the next line would start inside it.
            self._torn = self._torn[self._put(self._torn) :]
        except BrokenPipeError as e:
            self._broken = e
            raise
        if self._torn:
            raise BlockingIOError("the reader does not keep up")
        for i, line in enumerate(lines):
            try:
                sent = self._put(line)
            except OSError as e:
                if isinstance(e, BrokenPipeError):
                    self._broken = e
                if i == 0:
                    raise
                return i
            if sent < len(line):
                self._torn = line[sent:]
                return i + 1
        return len(lines)

    def stop_waiting(self) -> None:
        """Makes a write that waits for a slow reader of a non-blocking descriptor give up."""
        self._closing.set()

    def close(self) -> None:
        """Leaves the descriptor open: it belongs to the process."""

    def _put(self, data: bytes) -> int:
        sent = 0
        while sent < len(data):
            try:
                sent += os.write(self._fd, data[sent:])
            except BlockingIOError:
                if self._closing.is_set():
                    if sent:
                        return sent
                    raise
                select.select([], [self._fd], [], 0.1)
            except OSError:
                if sent:
                    return sent
                raise
        return sent


class FileTarget:
    """A file that is appended to, and set aside as `<path>.1` when it would grow over `max_bytes`.

    Args:
        path: the file; its folder must exist.
        max_bytes: size limit; on disk there is at most twice as much, plus one line.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            self._fd = self._open()
        except OSError as e:
            raise ConfigError(f"cannot write the log file {path}: {e.strerror or e}", param="log.file") from e
        self._size = os.fstat(self._fd).st_size

    def write(self, lines: Sequence[bytes]) -> int:
        """See `Target.write`. After an error (a full disk) the file ends with a whole line."""
        num_written = 0
        for line in lines:
            try:
                if self._size and self._size + len(line) > self._max_bytes:
                    self._rotate()
                self._append(line)
            except OSError:
                if num_written == 0:
                    raise
                return num_written
            num_written += 1
        return num_written

    def stop_waiting(self) -> None:
        """Files do not wait."""

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _append(self, line: bytes) -> None:
        sent = 0
        try:
            while sent < len(line):
                sent += os.write(self._fd, line[sent:])
        except OSError:
            if sent:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            raise
        self._size += sent

    def _rotate(self) -> None:
        """Raises OSError, and then goes on with the old file."""
        with contextlib.suppress(FileNotFoundError):  # moved by somebody else, or by a rotation that failed half-way
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        old_fd, self._fd = self._fd, self._open()
        os.close(old_fd)
        self._size = 0
