"""An engine in a process of its own, seen from bench_peers.py; `protocol.py` says how the two speak."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Asked

END_LIMIT_S = 30


class EngineFailed(Exception):
    """The engine ended, or made another number of tokens than asked."""


class EngineProcess:
    """A started engine, ready for work.

    Args:
        name: what tables call it.
        command: the process that speaks the protocol.
        log_folder: where its standard error goes, as `name`.log.

    Raises:
        EngineFailed: it ended before it was ready.
    """

    def __init__(self, name: str, command: Sequence[str], log_folder: Path) -> None:
        self.log = log_folder / f"{name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.facts = self._next()
        self.working_cpu_s = 0.0

    def run(self, requests: Sequence[Asked]) -> dict[str, float]:
        """Seconds, tokens, mean seconds to the first token and CPU seconds of one workload.

        Raises:
            EngineFailed: see the class.
        """
        assert self._process.stdin is not None
        began_cpu_s = self.cpu_s()
        try:
            self._process.stdin.write(json.dumps({"requests": list(requests)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._has_ended()
        told = self._next()
        wanted = sum(request["max_tokens"] for request in requests)
        if told["tokens"] != wanted:
            raise EngineFailed(f"{self.log.stem} made {told['tokens']} tokens of {wanted}")
        told["cpu_s"] = self.cpu_s() - began_cpu_s
        self.working_cpu_s += told["cpu_s"]
        return told

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far, those of the start included."""
        return sum(_cpu_s(pid) for pid in _family(self._process.pid))

    def peak_rss_bytes(self) -> int:
        """Highest resident memory of the process and its children, each by itself, added up."""
        return sum(_peak(pid) for pid in _family(self._process.pid))

    def close(self) -> None:
        """Ends it; once is enough, twice does no harm."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It ended with a question unread.
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else self._has_ended()

    def _has_ended(self) -> Any:
        self.close()
        raise EngineFailed(f"{self.log.stem} ended; its last words are in {self.log}")


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(member for child in children for member in _family(int(child)))]


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
