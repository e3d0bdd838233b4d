"""B1: the table of bad inputs, alone and beside four good requests whose text must not change."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from jaxpaged.tokenizer import Tokenizer
from tests.server.bad_inputs import OK, Row, rows
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.jax

NEIGHBOURS = ("one neighbour", "another one", "the third", "and a fourth")


def test_the_table_is_large_and_names_each_row_once() -> None:
    table = list(rows())
    assert len(table) >= 500
    assert len({(row.path, row.name) for row in table}) == len(table)
    assert min(Counter(row.status == OK for row in table).values()) >= 150


def check(server: LiveServer, row: Row) -> str | None:
    """What is wrong with the answer to a row."""
    watch = Stopwatch()
    reply = server.post(row.path, row.body)
    if reply.status != row.status:
        return f"{row.path} {row.name}: {reply.status} in place of {row.status}: {reply.content[:200]!r}"
    if not watch.is_within(2.0):
        return f"{row.path} {row.name}: {watch.seconds():.1f} s"
    if row.param is not None and not str(reply.error["param"]).startswith(row.param):
        return f"{row.path} {row.name}: names {reply.error['param']}: {reply.error['message'][:200]}"
    return None


def test_alone(server: LiveServer) -> None:
    assert [fault for row in rows() if (fault := check(server, row))] == []


@contextlib.contextmanager
def neighbours(server: LiveServer) -> Iterator[list[str]]:
    """Four clients that ask the same again and again; what was answered otherwise than at first is in the list."""
    expected = [server.complete(prompt, max_tokens=60).text for prompt in NEIGHBOURS]
    is_over, wrong = threading.Event(), []
    counts = [0] * len(NEIGHBOURS)

    def ask(index: int) -> None:
        while not is_over.is_set():
            reply = server.complete(NEIGHBOURS[index], max_tokens=60, stream=bool(index % 2))
            counts[index] += 1
            if reply.status != 200 or reply.text != expected[index]:
                wrong.append(f"{NEIGHBOURS[index]}: {reply.content[:200]!r}")

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(NEIGHBOURS))]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert min(counts) >= 2


def test_beside_four_good_requests(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.001)) as server:
        with neighbours(server) as wrong:
            faults = [fault for row in list(rows())[::2] if (fault := check(server, row))]
        assert faults == []
        assert wrong == []
