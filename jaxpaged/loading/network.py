"""Is anybody there? Answered in a bounded time, whatever the resolver and the routers do."""

import os
import queue
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable

DEFAULT_PORTS = {"http": 80, "https": 443, "socks": 1080, "socks5": 1080, "socks5h": 1080}


def is_reachable(urls: Iterable[str], timeout_s: float) -> bool:
    """Whether the server of any of `urls` (or the proxy that stands before it) accepts a connection within `timeout_s`.

    Nothing is sent. Name lookups cannot be interrupted, so each try has a thread of its own that is left behind when time is up.
    """
    targets = {target for url in urls if (target := _target(url)) is not None}
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def connect(host: str, port: int) -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError:
            answers.put(False)
        else:
            answers.put(True)

    for host, port in targets:
        threading.Thread(target=connect, args=(host, port), name="jaxpaged-probe", daemon=True).start()
    end_s = time.monotonic() + timeout_s
    for _ in targets:
        try:
            if answers.get(timeout=max(end_s - time.monotonic(), 0.001)):
                return True
        except queue.Empty:
            return False
    return False


def host_of(url: str) -> str:
    """Host and port of `url` for messages: without credentials, path and query."""
    parts = urllib.parse.urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.hostname or '?'}{port}"


def _target(url: str) -> tuple[str, int] | None:
    parts = urllib.parse.urlsplit(url)
    if not parts.hostname:
        return None
    proxies = urllib.request.getproxies()
    proxy = os.environ.get("PIP_PROXY") or proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.hostname:
        return None
    try:
        return parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 80)
    except ValueError:
        return None
