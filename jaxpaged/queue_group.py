"""Requests that come together, such as the prompts of one HTTP body, and those of them that wait before the queue.

The limits of the queue are asked for the first of a group alone. The others go in as the queue has room, so that a group of any size is
served in the end where one request is, and no limit is passed over.
"""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from jaxpaged.errors import JaxpagedError
from jaxpaged.request import Request

if TYPE_CHECKING:
    from jaxpaged.mailbox import Mailbox


class QueueGroup:
    """What has become of the first request of a group; the engine's driver alone looks at it.

    Attributes:
        is_let_in: a request of the group was queued: the others wait until there is room for them.
        refusal: what the first one was refused with, and so the others are.
    """

    def __init__(self) -> None:
        self.is_let_in = False
        self.refusal: JaxpagedError | None = None


class HeldRequest(NamedTuple):
    """A request that waits for room in the queue, and where its outputs will go."""

    request: Request
    mailbox: "Mailbox"


class HeldRequests:
    """They wait in the order in which they came, and go in before whatever comes later."""

    def __init__(self) -> None:
        self._held: deque[HeldRequest] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._held.copy())

    @property
    def mailboxes(self) -> "list[Mailbox]":
        """Of all of them; any thread may ask."""
        return [held.mailbox for held in self._held.copy()]

    @property
    def first(self) -> HeldRequest | None:
        """The one that goes in next."""
        return self._held[0] if self._held else None

    def put(self, held: HeldRequest) -> None:
        """One more, behind the others."""
        self._held.append(held)

    def take_first(self) -> HeldRequest:
        """Takes out the one that goes in next."""
        return self._held.popleft()

    def take_id(self, request_id: str) -> list[HeldRequest]:
        """Takes out all of that id."""
        return self._take([held for held in self._held if held.request.request_id == request_id])

    def take_mailbox(self, mailbox: "Mailbox") -> list[HeldRequest]:
        """Takes out the one whose outputs would go there, if it is here."""
        return self._take([held for held in self._held if held.mailbox is mailbox])

    def take_closed(self) -> list[HeldRequest]:
        """Takes out those whose event loop was closed, so that nobody reads."""
        return self._take([held for held in self._held if held.mailbox.loop.is_closed()])

    def take_all(self) -> list[HeldRequest]:
        """Takes out all."""
        return self._take(list(self._held))

    def _take(self, taken: list[HeldRequest]) -> list[HeldRequest]:
        if taken:
            gone = {id(held.mailbox) for held in taken}
            self._held = deque(held for held in self._held if id(held.mailbox) not in gone)
        return taken
