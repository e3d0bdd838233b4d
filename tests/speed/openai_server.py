"""A server that speaks just enough of OpenAI's API, with every way to fail that a load generator meets."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


class OpenAiServer(ThreadingHTTPServer):
    """Answers each prompt with `max_tokens` events, in lines that end as `newline` says.

    Attributes:
        bodies: of every POST, with its path and key.
        failures: first token id of the prompt -> how its request fails: status, cut, error, no-usage, rubbish.
        most_open: the most requests that were open at once.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, newline: bytes = b"\n") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.newline = newline
        self.bodies: list[tuple[str, str | None, dict[str, Any]]] = []
        self.failures: dict[int, str] = {}
        self.lock, self.num_open, self.most_open = threading.Lock(), 0, 0
        self.hold: threading.Barrier | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(200, json.dumps({"object": "list", "data": [{"id": "a-model"}]}).encode())

    def do_POST(self) -> None:
        server = cast(OpenAiServer, self.server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.bodies.append((self.path, self.headers["authorization"], body))
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            if server.hold is not None:
                server.hold.wait(20)
            self._answer(server, body)
        finally:
            with server.lock:
                server.num_open -= 1

    def _answer(self, server: OpenAiServer, body: dict[str, Any]) -> None:
        is_chat = "messages" in body
        failure = None if is_chat else server.failures.get(body["prompt"][0])
        if failure == "status":
            self._reply(429, b'{"error": {"message": "full"}}')
            return
        number = body["max_completion_tokens" if is_chat else "max_tokens"]
        prompt = len(body["messages"][0]["content"].split()) if is_chat else len(body["prompt"])
        choices = [{"index": 0, "delta": {"content": "x"}} if is_chat else {"index": 0, "text": "x"}] * number
        events: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] * is_chat
        events += [{"choices": [choice]} for choice in choices]
        if failure == "error":
            events = [*events[:1], {"error": {"message": "lost"}}]
        if failure is None:
            events.append({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": number}})
        texts = [json.dumps(event) for event in events] + ["{rubbish" if failure == "rubbish" else "[DONE]"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", "100000" if failure == "cut" else str(self._size(texts, server.newline)))
        self.end_headers()
        self.wfile.write(self._stream(texts, server.newline))
        self.close_connection = failure == "cut"

    @staticmethod
    def _stream(texts: list[str], newline: bytes) -> bytes:
        return b": ping" + newline * 2 + b"".join(b"data: " + text.encode() + newline * 2 for text in texts)

    def _size(self, texts: list[str], newline: bytes) -> int:
        return len(self._stream(texts, newline))

    def _reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def openai_server(newline: bytes = b"\n") -> Iterator[OpenAiServer]:
    """Serves while inside."""
    server = OpenAiServer(newline)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
