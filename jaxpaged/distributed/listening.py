"""The port at which process 0 hands out its steps: on the coordinator's own address and on no other."""

import contextlib
import errno
import socket
import time

from jaxpaged.errors import ConfigError

RESOLVE_S = 30.0
"""A name that was made with this process, such as a pod's, may take a while to be known."""
_BACKLOG = 128
RETRY_S = 0.5
_REASONS = {
    errno.EADDRINUSE: "it is taken by another program; choose another one",
    errno.EACCES: "this user may not listen there; choose a port from 1024 up",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address; process 0 must run where distributed.coordinator says",
}


def resolved(host: str, port: int, patience_s: float = RESOLVE_S) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The first address of a host. Raises ConfigError when its name is not known, after some patience."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return family, address
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline_s or isinstance(error, UnicodeError):
                raise ConfigError(
                    f"the host {host} of distributed.coordinator is not known ({error})", param="distributed.coordinator"
                ) from error
        time.sleep(RETRY_S)


def listen(host: str, port: int, *, param: str) -> socket.socket:
    """A listener on that address alone. Raises ConfigError with the reason and the way out."""
    family, address = resolved(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}", param=param) from error
    return listener


def connect(host: str, port: int, deadline_s: float) -> socket.socket | None:
    """A connection, once somebody listens there; None when nobody did up to a monotonic time. Raises ConfigError for an unknown host."""
    while True:
        family, address = resolved(host, port, patience_s=max(0.0, deadline_s - time.monotonic()))
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(5.0)
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            return connection
        except OSError:
            with contextlib.suppress(OSError):
                connection.close()
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(RETRY_S)
