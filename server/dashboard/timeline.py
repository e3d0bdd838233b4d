"""The lives of the last requests, from their events."""

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from jaxpaged import events

MAX_ENDED = 64
MAX_ROWS = 40
MAX_NAME_CHARS = 80


class RequestRow(msgspec.Struct):
    """A request. Times are seconds since 1970; None: not yet, or never.

    Attributes:
        id: what the engine calls it.
        name: what its client calls it, if that is another word.
        slot: of its pages, while it runs.
        reason: of its end: stop, length, abort, error; empty: it goes on.
        preempted_s: when it lost its pages, the last times.
    """

    id: str
    queued_s: float
    num_prompt_tokens: int
    name: str = ""
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    slot: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int = 0
    reason: str = ""
    preempted_s: tuple[float, ...] = ()


class Timeline:
    """Keeps all open requests, of which the engine keeps more itself, and the last that have ended. Whoever calls brings a lock."""

    def __init__(self) -> None:
        self._open: dict[str, RequestRow] = {}
        self._ended: OrderedDict[str, RequestRow] = OrderedDict()

    def take(self, event: events.Event) -> None:
        """One event of a request."""
        match event:
            case events.RequestQueued():
                self._open[event.request_id] = RequestRow(event.request_id, event.time_s, event.num_prompt_tokens)
            case events.RequestScheduled():
                if (row := self._open.get(event.request_id)) is not None and row.scheduled_s is None:
                    row.scheduled_s, row.num_cached_tokens = event.time_s, event.num_cached_tokens
            case events.RequestFirstToken():
                if (row := self._open.get(event.request_id)) is not None:
                    row.first_token_s = event.time_s
            case events.RequestPreempted():
                if (row := self._open.get(event.request_id)) is not None:
                    row.preempted_s = (*row.preempted_s, event.time_s)[-4:]
            case events.RequestFinished():
                self._end(event)
            case events.HttpAnswered() if event.answer_id:
                # The engine's requests behind an answer are called the same, with their index behind.
                for row in self._ended.values():
                    if row.id.rpartition("-")[0] == event.answer_id:
                        row.name = event.request_id

    def rows(self, slots: Mapping[str, int], names: Mapping[str, str], now_s: float, seconds: float) -> list[RequestRow]:
        """Copies of the newest rows, newest first, those that run before those that wait.

        Args:
            slots: request id -> slot of those that hold pages.
            names: id of an answer that is being made -> what its client calls it.
            now_s: the present.
            seconds: those that ended longer ago are left out.
        """
        running = [row for row in self._open.values() if row.scheduled_s is not None]
        waiting = [row for row in self._open.values() if row.scheduled_s is None] if len(running) < MAX_ROWS else []
        ended = [row for row in self._ended.values() if (row.finished_s or 0.0) >= now_s - seconds]
        # Some of those that have ended are shown in any case, so that the picture moves.
        num_ended = max(MAX_ROWS // 4, MAX_ROWS - len(self._open))
        shown = [*reversed(ended[-num_ended:])]
        live = sorted([*running, *waiting[:MAX_ROWS]], key=lambda row: row.scheduled_s or float("inf"))[: MAX_ROWS - len(shown)]
        return [self._copy(row, slots, names) for row in sorted([*live, *shown], key=lambda row: row.queued_s, reverse=True)]

    def _end(self, event: events.RequestFinished) -> None:
        row = self._open.pop(event.request_id, None)
        if row is None:
            return
        row.finished_s, row.reason, row.num_output_tokens = event.time_s, event.reason, event.num_output_tokens
        self._ended[row.id] = row
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    @staticmethod
    def _copy(row: RequestRow, slots: Mapping[str, int], names: Mapping[str, str]) -> RequestRow:
        name = row.name or names.get(row.id.rpartition("-")[0], "")
        return msgspec.structs.replace(row, id=cut(row.id), name=cut(name), slot=slots.get(row.id))


def cut(text: str) -> str:
    """A client's word, at a length that fits on a page."""
    return text if len(text) <= MAX_NAME_CHARS else f"{text[: MAX_NAME_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"
