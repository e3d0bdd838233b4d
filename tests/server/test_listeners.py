"""Ports, the admin socket and certificates: what cannot be had is said in one sentence, before a model is looked at."""

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from jaxpaged.config import Config, ServerConfig
from jaxpaged.errors import ConfigError
from server.listeners import bind_port, bind_unix, close_all, tls_context, url_of
from tests.server.door_server import Connection, door_server

pytestmark = pytest.mark.jax


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def test_a_free_port_is_the_same_for_all_addresses_of_a_name() -> None:
    sockets = bind_port("localhost", 0)
    ports = {listener.getsockname()[1] for listener in sockets}
    assert len(ports) == 1
    assert url_of(sockets[0], is_tls=False).endswith(f":{ports.pop()}")
    assert not any(listener.getblocking() for listener in sockets)
    close_all(sockets)


def test_a_taken_port_is_refused_by_name(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on port {port} of 127.0.0.1: it is taken by another program; choose another"):
        bind_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("no.such.host.invalid", "the name is not known"),
        ("203.0.113.7", "no interface of this machine has that address"),
        ("a" * 300, "the name is not known"),
    ],
)
def test_other_hosts(host: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bind_port(host, 0)


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")])
def test_urls(host: str, url: str) -> None:
    sockets = bind_port(host, 0)
    assert url_of(sockets[0], is_tls=False).startswith(url)
    assert url_of(sockets[0], is_tls=True).startswith("https://")
    close_all(sockets)


def test_a_port_that_only_root_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-61; tests may be run by root, so the system's answer is given here."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(
        ConfigError, match="cannot listen on port 80 of 127.0.0.1: this user may not listen there; choose a port from 1024 up"
    ):
        bind_port("127.0.0.1", 80)


def test_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-61; with or without IPv6 on this machine."""
    bound: list[object] = []
    monkeypatch.setattr(socket.socket, "bind", lambda _, address: bound.append(address))
    monkeypatch.setattr(socket.socket, "listen", lambda *_: None)
    sockets = bind_port("::1", 8000)
    assert bound == [("::1", 8000, 0, 0)]
    assert [listener.family for listener in sockets] == [socket.AF_INET6]
    close_all(sockets)

    class Bound:
        def getsockname(self) -> tuple[str, int, int, int]:
            return "::1", 8000, 0, 0

    assert url_of(Bound(), is_tls=False) == "http://[::1]:8000"  # type: ignore[arg-type]


def test_the_admin_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    before = os.umask(0)
    try:
        listener = bind_unix(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="another server listens on"):
        bind_unix(path)
    listener.close()
    again = bind_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "what a killed server left is replaced"
    again.close()


def test_nothing_else_is_replaced_by_the_admin_socket(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        bind_unix(file)
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot make the socket"):
        bind_unix(tmp_path / "no" / "folder")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who signs certificates here."""
    return trustme.CA()


def pem(folder: Path, authority: trustme.CA) -> ServerConfig:
    """A certificate of localhost and its key, in files."""
    made = authority.issue_cert("localhost")
    chain, key = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return ServerConfig(ssl_certfile=str(chain), ssl_keyfile=str(key), header_timeout_s=0.5)


def test_tls_works_and_plain_http_on_it_is_closed_at_once(tmp_path: Path, authority: trustme.CA) -> None:
    options = pem(tmp_path, authority)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    with door_server(Config(server=options), tls=tls_context(options)) as server:
        secure = server.connect(tls=client)
        assert secure.request("GET", "/livez").status == 200
        plain = server.connect()
        plain.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert plain.seconds_to_end() < 0.4
        assert b"HTTP" not in plain.seen
        silent = Connection(server.port)
        assert silent.seconds_to_end() < 2.5, "a handshake does not take longer than a head may"
        silent.close()


@pytest.mark.parametrize("fault", ["no key", "no certificate", "missing", "swapped", "other key", "garbage", "encrypted"])
def test_a_bad_pair_is_refused(tmp_path: Path, authority: trustme.CA, fault: str) -> None:
    good = pem(tmp_path, authority)
    other = authority.issue_cert("localhost").private_key_pem.bytes()
    (tmp_path / "other.pem").write_bytes(other)
    (tmp_path / "garbage.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    if fault == "encrypted":
        from cryptography.hazmat.primitives import serialization

        key = serialization.load_pem_private_key(other, None)
        words = serialization.BestAvailableEncryption(b"secret")
        (tmp_path / "locked.pem").write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, words)
        )
    certificate, key_file = str(good.ssl_certfile), str(good.ssl_keyfile)
    options, sentence = {
        "no key": (ServerConfig(ssl_certfile=certificate), "no certificate with its key"),
        "no certificate": (ServerConfig(ssl_keyfile=key_file), "ssl_keyfile needs ssl_certfile"),
        "missing": (ServerConfig(ssl_certfile=certificate, ssl_keyfile=str(tmp_path / "none.pem")), "cannot read ssl_keyfile"),
        "swapped": (ServerConfig(ssl_certfile=key_file, ssl_keyfile=certificate), "no certificate with its key"),
        "other key": (ServerConfig(ssl_certfile=certificate, ssl_keyfile=str(tmp_path / "other.pem")), "KEY_VALUES_MISMATCH"),
        "garbage": (ServerConfig(ssl_certfile=str(tmp_path / "garbage.pem"), ssl_keyfile=key_file), "no certificate with its key"),
        "encrypted": (ServerConfig(ssl_certfile=certificate, ssl_keyfile=str(tmp_path / "locked.pem")), "is encrypted"),
    }[fault]
    with pytest.raises(ConfigError, match=sentence) as caught:
        tls_context(options)
    assert "\n" not in caught.value.message
    assert tls_context(ServerConfig()) is None
