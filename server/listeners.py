"""The sockets of a server, bound before anything heavy happens, and the certificate it speaks TLS with."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path

from jaxpaged.config import ServerConfig
from jaxpaged.errors import ConfigError

BACKLOG = 2048
ADMIN_HOST = "127.0.0.1"
_REASONS = {
    errno.EADDRINUSE: "it is taken by another program; choose another one with --port",
    errno.EACCES: "this user may not listen there; choose a port from 1024 up",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address",
}


def bind_port(host: str, port: int, *, param: str = "server.port") -> list[socket.socket]:
    """Sockets that listen on every address that the host's name stands for; port 0 is a free one, the same for all.

    Raises:
        ConfigError: the name is unknown, or the address cannot be had; with the reason and the way out.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}: the name is not known ({error})", param="server.host") from error
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        where = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
        try:
            sockets.append(_listen(socket.socket(family, kind, protocol), where))
        except OSError as error:
            # A machine without IPv6 still resolves localhost to ::1; what is taken is taken.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                close_all(sockets)
                raise _refusal(host, port, error, param) from error
            failure = error
    if not sockets:
        assert failure is not None
        raise _refusal(host, port, failure, param) from failure
    return sockets


def bind_unix(path: Path) -> socket.socket:
    """A unix socket that its owner alone can reach; a socket there that nobody listens on any more is replaced.

    Raises:
        ConfigError: the path cannot be had.
    """
    param = "server.admin_socket"
    try:
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"{path} is there already and is no socket", param=param)
            if _answers(path):
                raise ConfigError(f"another server listens on {path}; choose another path with --server.admin-socket", param=param)
            path.unlink()
        before = os.umask(0o177)
        try:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            return _listen(unix, str(path))
        finally:
            os.umask(before)
    except OSError as error:
        raise ConfigError(f"cannot make the socket {path}: {error.strerror or error}", param=param) from error


def url_of(listener: socket.socket, *, is_tls: bool) -> str:
    """`http://127.0.0.1:8000`; a host that stands for all addresses is shown as this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' if is_tls else ''}://{host}:{port}"


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Closes them."""
    for listener in sockets:
        with contextlib.suppress(OSError):
            listener.close()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The certificate and its key, read and matched; None when none is named.

    Raises:
        ConfigError: one of the two is missing, unreadable or encrypted, or they do not belong together.
    """
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile beside it", param="server.ssl_keyfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"cannot read {name} {file}", param=f"server.{name}")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _EncryptedKeyError:
        raise ConfigError(f"the key in {key or certificate} is encrypted; give one that is not", param="server.ssl_keyfile") from None
    except (OSError, ValueError) as error:
        named = certificate if key is None else f"{certificate} and {key}"
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        raise ConfigError(f"{named} are no certificate with its key: {reason}", param="server.ssl_certfile") from error
    return context


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedKeyError


def _listen(listener: socket.socket, address: tuple[object, ...] | str) -> socket.socket:
    """Raises OSError, and then nothing is left open."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _refusal(host: str, port: int, error: OSError, param: str) -> ConfigError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return ConfigError(f"cannot listen on port {port} of {host}: {reason}", param=param)
