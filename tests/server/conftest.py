"""Live servers for the tests of the HTTP app. What imports jax is imported where it is used: the quick tests of this folder need none."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level
from tests.tiny_model import CHAT_TEMPLATE

if TYPE_CHECKING:
    from tests.server.live import LiveServer


@pytest.fixture(scope="session")
def chat_tokenizer() -> Tokenizer:
    """Ids 0-2 are control tokens (2 ends an answer), 3-258 the bytes, then some words; with a chat template."""
    return byte_level(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def module_server(chat_tokenizer: Tokenizer) -> Iterator["LiveServer"]:
    """A server for all tests of a file."""
    from tests.server.live import live_server

    with live_server(chat_tokenizer) as server:
        yield server


@pytest.fixture
def server(module_server: "LiveServer") -> Iterator["LiveServer"]:
    """The same, with the books checked after each test."""
    yield module_server
    module_server.after_check()
