"""Who may come to process 0: whoever knows the secret and has the same code and options, and nobody else."""

import contextlib
import socket
import struct
import threading
from contextlib import closing

import pytest

from jaxpaged.distributed import handshake, leader
from jaxpaged.distributed.handshake import MAGIC, NONCE_BYTES
from jaxpaged.distributed.leader import Leader
from jaxpaged.distributed.terms import difference
from jaxpaged.errors import ConfigError, StreamError
from tests.distributed.company import TERMS, Company, End, company, free_ports, pair, processes


def knock(made: Company) -> socket.socket:
    """A connection of somebody."""
    connection = socket.create_connection(("127.0.0.1", made.ports[1]), 30)
    connection.settimeout(30)
    return connection


def test_two_meet() -> None:
    with pair() as (made, leader, follower, _):
        assert leader.bind_host == "127.0.0.1"
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(follower.least("pages", 7)))
        thread.start()
        assert leader.least("pages", 9) == 7
        thread.join()
        assert found == [7]
        thread = threading.Thread(target=follower.same, args=("model", "m"))
        thread.start()
        leader.same("model", "m")
        thread.join()
        assert made.said == ["waiting for process 1", "all 2 processes are here"]


def test_the_port_is_free_once_all_are_there() -> None:
    with pair() as (made, *_):
        with pytest.raises(ConnectionRefusedError):
            knock(made)


def test_another_secret_is_not_answered() -> None:
    with company() as made:
        stranger, _ = made.follower(secret=b"f" * 16)
        with pytest.raises(ConfigError, match="without an answer: give all processes the same distributed.secret"):
            stranger.join()
        known, _ = made.follower()
        known.join()
        made.joined()
        assert "somebody was turned away: a process came with another secret" in made.said


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ({**TERMS, "cache.page_size": "32"}, "cache.page_size is 32 in process 1 and 16 in process 0"),
        ({"cache.page_size": "16"}, "the mesh is nothing in process 1 and tensor 2 in process 0"),
        ({**TERMS, "more": "x" * 3000}, "more is x{60} in process 1 and nothing in process 0"),
    ],
)
def test_other_options_are_refused_by_name(terms: dict[str, str], sentence: str) -> None:
    with company() as made:
        other, _ = made.follower(terms=terms)
        with pytest.raises(ConfigError, match=f"process 0 refuses this one: {sentence}"):
            other.join()
    assert difference(TERMS, dict(reversed(TERMS.items())), 1) is None


def test_who_counts_otherwise_or_comes_twice_is_refused() -> None:
    with company(number=3) as made:
        first, _ = made.follower(1)
        first.join()
        for index, number, sentence in (
            (1, 3, "process 1 is here already"),
            (2, 4, "it says that there are 4 processes, and process 0 that there are 3"),
            (0, 3, "there is no process 0 of 3 beside process 0"),
        ):
            other, _ = made.follower(index)
            other.processes = processes(index, made.ports, number=number)
            with pytest.raises(ConfigError, match=sentence):
                other.join()
        last, _ = made.follower(2)
        last.join()
        made.joined()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"x" * 100,
        MAGIC + bytes(NONCE_BYTES) + struct.pack("!I", 2**31) + b"x" * 1000,
        MAGIC + bytes(NONCE_BYTES) + struct.pack("!I", 2) + b"{}" + bytes(32),
    ],
)
def test_rubbish_is_closed_without_a_word(content: bytes) -> None:
    with company() as made, closing(knock(made)) as connection:
        assert connection.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL).startswith(MAGIC)
        answer = b""
        with contextlib.suppress(OSError):  # it may have been closed by then
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        assert answer == b""
        other, _ = made.follower()
        other.join()
        made.joined()


def test_who_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd that is silent is cut off, and the next ones are closed at once."""
    monkeypatch.setattr(leader, "MORE_VISITORS", 2)
    with company() as made:
        crowd = [knock(made) for _ in range(6)]
        heads = [connection.recv(1) for connection in crowd]
        assert heads == [MAGIC[:1]] * 4 + [b""] * 2
        crowd[0].close()
        other, _ = made.follower()
        other.join()
        made.joined()
        for connection in crowd:
            connection.close()


def test_a_handshake_has_a_limit_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    with company() as made, closing(knock(made)) as connection:
        assert connection.recv(1000).startswith(MAGIC)
        connection.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            for byte in MAGIC + bytes(NONCE_BYTES + 100):  # each soon after the one before
                connection.sendall(bytes([byte]))
                try:
                    assert connection.recv(1) == b""
                    break
                except TimeoutError:
                    continue
        assert made.said[-1] == "somebody was turned away: nothing came in time"


def test_those_who_do_not_come() -> None:
    end = End()
    ports = free_ports()
    alone = Leader(processes(0, ports, start_timeout_s=0.05), TERMS, leave=end.leave)
    alone.listen()
    with pytest.raises(StreamError, match=r"process 1 did not come in 0\.05 s"):
        alone.join(lambda message: None, end.die)
    alone.fail("over")
    with company() as made:
        other, _ = made.follower()
        other.processes = processes(1, free_ports(), start_timeout_s=0.05)
        with pytest.raises(StreamError, match=r"process 0 did not listen at port \d+ of 127\.0\.0\.1 in 0\.05 s"):
            other.join()


def test_taken_ports_are_refused_by_name() -> None:
    ports = free_ports()
    for taken, param in zip(ports, ("distributed.coordinator", "distributed.port"), strict=True):
        with socket.create_server(("127.0.0.1", taken)):
            with pytest.raises(ConfigError, match=f"cannot listen on port {taken} of 127.0.0.1: it is taken") as caught:
                Leader(processes(0, ports), TERMS).listen()
            assert caught.value.param == param
