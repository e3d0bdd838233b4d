"""A model file mapped into memory, read-only."""

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from jaxpaged.errors import CheckpointError


class MappedFile:
    """One file in the address space: nothing is read before it is touched, and what was read can be given back.

    Attributes:
        path: where the file lies, for messages.
        size: length in bytes when it was opened.
        buffer: the mapping; slices of it are copies, `view` is not.
    """

    def __init__(self, path: Path) -> None:
        """Maps `path`. Raises CheckpointError when it is missing, empty, unreadable or no plain file."""
        self.path = path
        try:
            # Asked before opening: opening a pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CheckpointError(f"{path} is not a plain file")
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(f"{path} is empty: fetch or copy the model again")
                self.buffer = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            if path.is_symlink():
                raise CheckpointError(f"{path} is a symbolic link to {os.readlink(path)}, which does not exist") from error
            raise CheckpointError(f"{path} does not exist") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def view(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) as uint8, without a copy, read-only; the caller has checked the range."""
        return np.frombuffer(self.buffer, np.uint8, stop - start, start)

    def release(self, start: int, stop: int) -> None:
        """Lets the pages of bytes [start, stop) leave this process's memory; touched again, they come back from the file."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, start, min(stop, self.size) - start)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last view of it that is still held."""
        try:
            self.buffer.close()
        except BufferError:
            pass
