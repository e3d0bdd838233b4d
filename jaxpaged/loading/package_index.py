"""Fetches one wheel from the package index that pip or uv is set up for, without its dependencies and without running anything of it.

Tried in turn: this interpreter's own pip, a pip that uv provides, `uv pip install --target`. The first two leave a wheel, the
third an unpacked one. Source distributions are never taken: building one runs its code.
"""

import importlib.metadata
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jaxpaged.errors import DownloadError
from jaxpaged.loading.network import host_of, is_reachable
from jaxpaged.loading.progress import Meter, folder_growth

MIN_PIP = (24, 1)
"""The first with `--progress-bar raw`."""

REACH_AFTER_S = 2.5
REACH_TIMEOUT_S = 1.5
"""A tool that has met no index by then is stopped when none can be connected to: together under the promised 5 s."""

TICK_S = 0.1
KILL_WAIT_S = 5.0
WHEEL_ONLY = ("--no-deps", "--only-binary", ":all:")

_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")
_URL = re.compile(r"https?://[^\s,\"'`<>()]+")
_REACHED = re.compile(r"^\s*(https?://\S+ \"GET .* HTTP/|Fetched page|Collecting |Downloading |Progress )")
_PLACES = re.compile(r"^Looking in (?:indexes|links): (.+)$")
_NO_CONNECTION = re.compile(
    r"connection broken by|failed to establish a new connection|connection refused|connection error|error sending request"
    r"|dns error|timed out|name or service not known|name resolution|network is unreachable|max retries exceeded"
    r"|network (connectivity )?(is|was) disabled",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_NO_MATCH = re.compile(r"no matching distribution|could not find a version|no solution found|not found in the package", re.IGNORECASE)
_REFUSED = re.compile(r"\b([45]\d\d) (?:Client|Server) Error")
_ERROR_LINE = re.compile(r"^\s*(?:ERROR|error)\s*:\s*(.+)$")


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """A package, at one version or (None) the newest."""

    package: str
    version: str | None = None

    def __str__(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"


def fetch_wheel(requirement: Requirement, work: Path, meter: Meter) -> Path:
    """Fetch into the empty folder `work`.

    Returns:
        The wheel's file, or the folder that holds the unpacked wheel.

    Raises:
        DownloadError: no tool, no network (within 5 s), no such package, no space; one sentence.
    """
    downloads = work / "wheel"
    if pip := own_pip():
        return _download(pip, requirement, downloads, meter, os.environ)
    uv = find_uv()
    if uv is None:
        raise DownloadError(
            f"downloading {requirement} needs pip 24.1 or newer, or uv: run `{sys.executable} -m pip install --upgrade pip`"
            f" (without pip: `{sys.executable} -m ensurepip --upgrade` first), or install uv"
        )
    environment = {**os.environ, **_uv_environment()}
    uv_pip = [uv, "tool", "run", "-v", "--python", sys.executable, "--from", f"pip>={MIN_PIP[0]}.{MIN_PIP[1]}", "pip"]
    if ToolRun(Meter.silent(), suspect=_NO_CONNECTION).wait([*uv_pip, "--version"], {**environment, "UV_HTTP_RETRIES": "0"}) == 0:
        return _download(uv_pip, requirement, downloads, meter, environment)
    return _install(uv, requirement, work, meter, environment)


def own_pip() -> list[str] | None:
    """The command of this interpreter's pip, if it is new enough. `-P`: a pip.py in the working folder is not it."""
    found = _own_pip_version()
    return [sys.executable, "-P", "-m", "pip"] if found is not None and found >= MIN_PIP else None


def find_uv() -> str | None:
    """The first uv on PATH or beside this interpreter that really runs."""
    beside = Path(sys.executable).parent
    for candidate in (shutil.which("uv"), shutil.which("uv", path=str(beside))):
        if candidate is None:
            continue
        try:
            answer = subprocess.run([candidate, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return candidate
    return None


class ToolRun:
    """One run of pip or uv: follows its lines, draws its progress, and stops it when no index answers."""

    def __init__(self, meter: Meter, *, suspect: re.Pattern[str] | None = None) -> None:
        """`suspect`: a line that makes us look at once whether the index can be reached."""
        self.tail: deque[str] = deque(maxlen=60)
        self._suspect = suspect
        self._meter = meter
        self._urls: dict[str, None] = {}
        self._is_reached = False
        self._has_other_places = False
        self._next_probe_s = time.monotonic() + REACH_AFTER_S

    def wait(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `command` to its end and return its exit code; whatever ends this call ends the whole process group.

        Raises:
            DownloadError: the tool cannot be started, or it waits for an index that accepts no connection.
        """
        environment = {**environment, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "PIP_REQUIRE_VIRTUALENV": "0", "NO_COLOR": "1"}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise DownloadError(f"cannot run {command[0]}: {error.strerror}") from error
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read_lines, args=(process, lines), name="jaxpaged-tool-output", daemon=True)
        reader.start()
        try:
            while True:
                try:
                    line = lines.get(timeout=TICK_S)
                except queue.Empty:
                    self._probe()
                    continue
                if line is None:
                    return process.wait()
                self._follow(line.rstrip())
                self._probe()
        finally:
            _end(process)
            reader.join(KILL_WAIT_S)
            if process.stdout is not None and not reader.is_alive():
                process.stdout.close()

    def failure(self, requirement: Requirement) -> DownloadError:
        """What the lines say went wrong, in one sentence."""
        text = "\n".join(self.tail)
        if _NO_SPACE.search(text):
            return DownloadError(f"no disk space: could not download {requirement}; free some space or set JAXPAGED_HOME and TMPDIR")
        if _NO_CONNECTION.search(text):
            if self._is_reached:
                return DownloadError(f"the connection to the package index broke while downloading {requirement}; try again")
            return self._no_connection(f"downloading {requirement}")
        if _NO_MATCH.search(text):
            answer = f" (it answered {refused.group(1)})" if (refused := _REFUSED.search(text)) else ""
            return DownloadError(
                f"the package index has no wheel for {requirement}{answer}; check the name, the version and the index that is set up"
            )
        errors = [match.group(1) for line in self.tail if (match := _ERROR_LINE.match(line))]
        return DownloadError(f"could not download {requirement}: {errors[-1] if errors else 'pip or uv failed without a reason'}")

    def _follow(self, line: str) -> None:
        if progress := _RAW_PROGRESS.match(line):
            self._is_reached = True
            self._meter.update(int(progress.group(1)), int(progress.group(2)) or None)
            return
        self.tail.append(line)
        if self._is_reached:
            return
        if _REACHED.match(line):
            self._is_reached = True
            return
        if places := _PLACES.match(line):
            self._has_other_places |= any(not place.startswith("http") for place in places.group(1).split(", "))
        self._urls.update(dict.fromkeys(_URL.findall(line)))
        if self._suspect is not None and self._suspect.search(line):
            self._next_probe_s = 0.0

    def _probe(self) -> None:
        # A folder on this machine may hold what an index that is away does not give: then the tool's own patience counts.
        if self._is_reached or self._has_other_places or not self._urls or time.monotonic() < self._next_probe_s:
            return
        if not is_reachable(self._urls, REACH_TIMEOUT_S):
            raise self._no_connection("the download")
        self._is_reached = True

    def _no_connection(self, what: str) -> DownloadError:
        hosts = ", ".join(dict.fromkeys(host_of(url) for url in self._urls)) or "it"
        return DownloadError(
            f"no network: {what} got no connection to the package index ({hosts}); "
            "check the network, the proxy and the index that pip or uv is set up for, or give a local .gguf file or folder"
        )


def _download(pip: Sequence[str], requirement: Requirement, folder: Path, meter: Meter, environment: Mapping[str, str]) -> Path:
    temporary = folder.with_name("pip-temporary")
    temporary.mkdir(parents=True, exist_ok=True)
    options = [*WHEEL_ONLY, "--no-input", "--disable-pip-version-check", "--progress-bar", "raw", "--retries", "2"]
    run = ToolRun(meter)
    code = run.wait(
        [*pip, "download", "-vv", *options, "--dest", str(folder), str(requirement)],
        {**environment, "TMPDIR": str(temporary), "PIP_QUIET": "0"},
    )
    wheels = sorted(folder.glob("*.whl")) if code == 0 else []
    if len(wheels) != 1:
        raise run.failure(requirement)
    return wheels[0]


def _install(uv: str, requirement: Requirement, work: Path, meter: Meter, environment: Mapping[str, str]) -> Path:
    folder, cache = work / "unpacked", work / "uv-cache"  # a cache of our own shows how far uv is, and leaves nothing behind
    cache.mkdir(parents=True, exist_ok=True)
    options = [*WHEEL_ONLY, "--no-progress", "--python", sys.executable, "--target", str(folder)]
    run = ToolRun(Meter.silent(), suspect=_NO_CONNECTION)  # uv tries long, and takes nothing from elsewhere when an index is away
    with folder_growth(meter, cache):
        code = run.wait(
            [uv, "pip", "install", "-v", *options, str(requirement)], {**environment, "UV_CACHE_DIR": str(cache), "UV_NO_CACHE": "0"}
        )
    if code != 0 or not folder.is_dir():
        raise run.failure(requirement)
    return folder


def _own_pip_version() -> tuple[int, ...] | None:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _uv_environment() -> dict[str, str]:
    """uv does not read pip's settings: hand over the index and the certificates, unless uv has its own."""
    handed = {}
    settings = _pip_settings()
    if not (os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")) and settings.get("index-url"):
        handed["UV_DEFAULT_INDEX"] = settings["index-url"]
    if not os.environ.get("SSL_CERT_FILE") and settings.get("cert"):
        handed["SSL_CERT_FILE"] = settings["cert"]
    return handed


def _pip_settings() -> dict[str, str]:
    settings = {}
    if _own_pip_version() is not None and not os.environ.get("PIP_INDEX_URL"):
        listed = subprocess.run(
            [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "config", "list"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        settings = dict(re.findall(r"^global\.(index-url|cert)='(.*)'$", listed.stdout, re.MULTILINE))
    environment = {"index-url": os.environ.get("PIP_INDEX_URL"), "cert": os.environ.get("PIP_CERT")}
    return settings | {key: value for key, value in environment.items() if value}


def _read_lines(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the tool and what it started, if it still runs."""
    if process.poll() is not None:
        return
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(KILL_WAIT_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
