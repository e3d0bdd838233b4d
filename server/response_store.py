"""Responses that are kept for later calls, in memory and bounded: the oldest goes first, and all go with the process."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from jaxpaged.config import LimitsConfig
from jaxpaged.errors import NotFoundError
from server.protocol.chat import Message
from server.protocol.responses import KeptMessage, ResponseObject


class StoredResponse:
    """A response, and what a later one needs to go on from it.

    Args:
        response: as it is now.
        items: its input, for whoever asks.
        messages: the conversation before its answer, without instructions.

    Attributes:
        is_cancelled: somebody has cancelled it while it was made.
    """

    def __init__(self, response: ResponseObject, items: Sequence[KeptMessage], messages: Sequence[Message]) -> None:
        self.response, self.items, self.messages = response, list(items), list(messages)
        self.is_cancelled = False

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(msgspec.json.encode((self.response, self.items, self.messages)))

    def cancel(self) -> None:
        """Says that it is cancelled; whoever makes it sees that."""
        self.is_cancelled = True
        self.response = msgspec.structs.replace(self.response, status="cancelled")

    @property
    def conversation(self) -> list[Message]:
        """All messages, the answer among them."""
        answers = [part.text for item in self.response.output for part in item.content]
        return [*self.messages, *(Message(role="assistant", content=text) for text in answers)]


class ResponseStore:
    """Responses by their ids; one event loop calls it.

    Args:
        limits: how many, and how large all of them together.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._most, self._most_bytes = limits.max_stored_responses, limits.max_stored_size
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, or what has become of it; a response that is larger than all the room is not kept."""
        self._drop(stored.response.id)
        size = stored.size
        self._stored[stored.response.id] = (stored, size)
        self.num_bytes += size
        while self._stored and (len(self._stored) > self._most or self.num_bytes > self._most_bytes):
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """The response of that id. Raises NotFoundError: there is none, or none any more."""
        found = self._stored.get(response_id)
        if found is None:
            shown = response_id if len(response_id) <= 80 else response_id[:77] + "..."
            raise NotFoundError(
                f"There is no response {shown!r}: it was never stored, or was forgotten to make room for later ones "
                "(limits.max_stored_responses, limits.max_stored_size)",
                param=param,
            )
        return found[0]

    def remove(self, response_id: str) -> None:
        """Forgets a response. Raises NotFoundError."""
        self.get(response_id)
        self._drop(response_id)

    def has(self, stored: StoredResponse) -> bool:
        """Whether that very response is kept."""
        found = self._stored.get(stored.response.id)
        return found is not None and found[0] is stored

    def _drop(self, response_id: str) -> None:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.num_bytes -= found[1]
