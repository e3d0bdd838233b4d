"""API keys: every route asks for one, apart from those that are named here."""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from jaxpaged.config import Config
from jaxpaged.errors import AuthenticationError, ConfigError, ForbiddenError
from server.asgi_types import App, Receive, Scope, Send, header_of
from server.dashboard.files import FILE_PATHS
from server.error_body import send_error
from server.ledger import HEALTH_PATHS, METRICS_PATH

MAX_KEYS = 1000
MAX_KEY_FILE_BYTES = 2**20


class ApiKeys:
    """Keys that clients may present, of which digests are kept alone.

    Args:
        keys: none of them: nobody is asked for one.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, key: bytes) -> bool:
        """Whether it is one of them; takes as long whether it is or not."""
        digest, is_known = _digest(key), False
        for known in self._digests:
            is_known |= hmac.compare_digest(known, digest)
        return is_known


def read_keys(config: Config) -> ApiKeys:
    """The keys of `server.api_key` and `server.api_key_file` together.

    Raises:
        ConfigError: a key that no header can carry, or a file that is not there, holds no key, or is open to others.
    """
    keys = list(config.server.api_key)
    if config.server.api_key_file is not None:
        keys += _keys_of_file(Path(config.server.api_key_file).expanduser())
    if any(not key or not key.isascii() or not key.isprintable() or key != key.strip() for key in keys):
        raise ConfigError("an API key must be printable ASCII without spaces around it, and not empty", param="server.api_key")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{len(keys)} API keys are more than {MAX_KEYS}", param="server.api_key")
    return ApiKeys(keys)


class AuthLayer:
    """Answers 401 to whoever has no key, before anything else of a request is looked at.

    Args:
        keys: none: everybody may call.
        open_paths: exact paths that need none.
    """

    def __init__(self, app: App, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._keys and not self._is_open(scope):
            error = _refusal(header_of(scope, b"authorization"), self._keys)
            if error is not None:
                await send_error(scope, send, error)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] == "GET" and scope["path"] in self._open_paths


class NoBrowsersLayer:
    """Refuses what a browser sends for a web page: a page could reach a port of its user's own machine."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            for name in (b"origin", b"sec-fetch-site"):
                if header_of(scope, name) is not None:
                    error = ForbiddenError(f"operators' calls are not for web pages: send them without the header {name.decode()}")
                    await send_error(scope, send, error)
                    return
        await self._app(scope, receive, send)


def open_paths(config: Config) -> frozenset[str]:
    """Paths that need no key: health, and the files of the live page, which carry no data."""
    return HEALTH_PATHS | FILE_PATHS | ({METRICS_PATH} if config.metrics.public else frozenset())


def _refusal(header: bytes | None, keys: ApiKeys) -> AuthenticationError | None:
    if header is None:
        return AuthenticationError("this server asks for an API key: send it in the header `Authorization: Bearer KEY`")
    scheme, _, key = header.partition(b" ")
    if scheme.lower() != b"bearer":
        return AuthenticationError("the header Authorization must be `Bearer KEY`")
    return None if keys.has(key.strip()) else AuthenticationError("this API key is not known to the server")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_of_file(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are none."""
    param = "server.api_key_file"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror or error}", param=param) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"the key file {path} is open to others (mode {stat.S_IMODE(mode):03o}); run chmod 600 on it", param=param)
    if len(text) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"the key file {path} is over {MAX_KEY_FILE_BYTES} bytes", param=param)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"the key file {path} holds no key, and the server would be open; put one key on a line", param=param)
    return keys
