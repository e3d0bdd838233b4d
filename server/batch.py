"""OpenAI's batch files without HTTP: each line is a request, and each gets a line of its own in the answer.

A request goes through the same app as one over HTTP, so that it is checked, answered and counted in the same way.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from server.asgi_types import App, Message
from server.ledger import GENERATION_PATHS

MAX_CUSTOM_ID_CHARS: Final = 512
MAX_TRIES_ALONE: Final = 10
"""Of a request that is told to come again, although no other one of the batch is being answered."""


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchReply(NamedTuple):
    """An answer of the app."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: int


class BatchCounts(NamedTuple):
    """Requests of a batch: answered, and failed or refused."""

    completed: int
    failed: int


async def run_batch(app: App, lines: Iterable[bytes], write: Callable[[bytes], object], *, concurrency: int) -> BatchCounts:
    """Answers a batch file. A request that the queue has no room for (429) is asked again until it has.

    Args:
        app: behind its front.
        lines: of the file; blank ones are passed over. Read as they are needed.
        write: takes the answers, a line each with its newline, in the order of the requests.
        concurrency: requests at the same time, and answers that wait for an earlier one.

    Returns:
        How many were answered with 200, and how many were not.
    """
    completed = failed = 0
    asker = _Asker(app)
    waiting: list[asyncio.Task[tuple[bytes, bool]]] = []
    remaining: Iterator[bytes] = iter(line for line in lines if line.strip())
    try:
        while True:
            while len(waiting) < concurrency and (line := next(remaining, None)) is not None:
                waiting.append(asyncio.ensure_future(_answered(asker, line)))
            if not waiting:
                return BatchCounts(completed, failed)
            answer, is_good = await waiting[0]
            del waiting[0]
            write(answer + b"\n")
            completed, failed = completed + is_good, failed + (not is_good)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class _Asker:
    """Asks the app for all requests of a batch.

    Args:
        app: behind its front.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._num_asking = 0
        self._some_were_answered = asyncio.Event()

    async def ask(self, path: str, body: bytes) -> BatchReply:
        """The answer to a request, which waits for others of the batch while the queue has no room for it."""
        num_alone = 0
        while True:
            self._num_asking += 1
            try:
                reply = await _ask(self._app, path, body)
            finally:
                self._num_asking -= 1
            if reply.status != 429 or num_alone >= MAX_TRIES_ALONE:
                self._some_were_answered.set()
                return reply
            num_alone += self._num_asking == 0
            self._some_were_answered.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._some_were_answered.wait(), reply.retry_after_s)


async def _answered(asker: _Asker, line: bytes) -> tuple[bytes, bool]:
    """The line that answers a line, and whether the answer is one."""
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _line(None, None, {"code": "invalid_line", "message": f"this is no request of a batch: {str(error)[:200]}"}), False
    fault = _fault(asked)
    if fault is not None:
        return _line(asked.custom_id, None, {"code": "invalid_request", "message": fault}), False
    reply = await asker.ask(asked.url, msgspec.json.encode(asked.body))
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
    return _line(asked.custom_id, response, None), reply.status == 200


def _fault(asked: BatchLine) -> str | None:
    if len(asked.custom_id) > MAX_CUSTOM_ID_CHARS:
        return f"custom_id has at most {MAX_CUSTOM_ID_CHARS} characters, got {len(asked.custom_id)}"
    if asked.method != "POST" or asked.url not in GENERATION_PATHS:
        return f"{asked.method[:10]} {asked.url[:60]!r} is not for batches; there is POST of {', '.join(sorted(GENERATION_PATHS))}"
    if asked.body.get("stream"):
        return "an answer in a batch cannot be streamed: leave stream out"
    return None


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    return msgspec.json.encode({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error})


async def _ask(app: App, path: str, body: bytes) -> BatchReply:
    """One request through the app, without a socket."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
    is_read = False
    told: list[Message] = []

    async def receive() -> Message:
        nonlocal is_read
        if is_read:  # a client that never leaves
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        told.append(message)

    await app(scope, receive, send)
    start = next(message for message in told if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in told if message["type"] == "http.response.body")
    told_headers = dict(start["headers"])
    request_id, retry_after = told_headers.get(b"x-request-id", b""), told_headers.get(b"retry-after", b"1")
    return BatchReply(start["status"], request_id.decode(), content, int(retry_after))
