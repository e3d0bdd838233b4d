"""OpenAI's batch files without HTTP: each line is a request, and each gets a line of its own in the answer.

A request goes through the same app as one over HTTP, so that it is checked, answered and counted in the same way.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from server.asgi_types import App, Message
from server.ledger import GENERATION_PATHS

MAX_CUSTOM_ID_CHARS: Final = 512


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


class BatchCounts(NamedTuple):
    """Requests of a batch: answered, and failed or refused."""

    completed: int
    failed: int


async def run_batch(app: App, lines: Iterable[bytes], write: Callable[[bytes], object], *, concurrency: int) -> BatchCounts:
    """Answers a batch file.

    Args:
        app: behind its front.
        lines: of the file; blank ones are passed over. Read as they are needed.
        write: takes the answers, a line each with its newline, in the order of the requests.
        concurrency: requests at the same time, and answers that wait for an earlier one.

    Returns:
        How many were answered with 200, and how many were not.
    """
    completed = failed = 0
    waiting: list[asyncio.Task[tuple[bytes, bool]]] = []
    remaining: Iterator[bytes] = iter(line for line in lines if line.strip())
    try:
        while True:
            while len(waiting) < concurrency and (line := next(remaining, None)) is not None:
                waiting.append(asyncio.ensure_future(_answered(app, line)))
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


async def _answered(app: App, line: bytes) -> tuple[bytes, bool]:
    """The line that answers a line, and whether the answer is one."""
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _line(None, None, {"code": "invalid_line", "message": f"this is no request of a batch: {str(error)[:200]}"}), False
    fault = _fault(asked)
    if fault is not None:
        return _line(asked.custom_id, None, {"code": "invalid_request", "message": fault}), False
    reply = await _ask(app, asked.url, msgspec.json.encode(asked.body))
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
    request_id = next((value for name, value in start["headers"] if name == b"x-request-id"), b"")
    return BatchReply(start["status"], request_id.decode(), content)
