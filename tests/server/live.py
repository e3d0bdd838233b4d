"""A live server on the loopback: a scripted engine behind the whole app, and a client that validates and counts all it gets.

In-process clients read whole streams before they return, so everything here goes over real sockets.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import Config, LogConfig
from jaxpaged.errors import JaxpagedError
from jaxpaged.model_runner import Runner
from jaxpaged.tokenizer import Tokenizer
from server.app import create_app
from server.auth import read_keys
from server.ledger import End
from server.listeners import tls_context
from server.service import Service
from tests.event_log import EventLog
from tests.fakes import FailingRunner, ScriptRunner
from tests.script import free_talk
from tests.scripted_client import scripted_async_llm
from tests.server.conformity import GENERATION, check_answer, data_of, strict_json
from tests.server.door_server import TIMEOUT_S, DoorServer, wait_until

BEAM_STEP = re.compile(r"(.*)#\d+\.\d+")
"""The id of a request that is one beam's at one step."""


def printable_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the bytes that are ASCII letters, digits and the space."""
    wanted = {bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz 0123456789"}
    return [index for index in range(3, tokenizer.vocab_size) if tokenizer.token_bytes[index] in wanted]


def talker(tokenizer: Tokenizer, **limits: int) -> ScriptRunner:
    """A device that says letters, which hang on all that came before."""
    keep = set(printable_ids(tokenizer))
    avoid = [index for index in range(tokenizer.vocab_size) if index not in keep]
    script = free_talk(tokenizer.vocab_size, avoid=avoid)
    return ScriptRunner(script, vocab=tokenizer.vocab_size, keeps_histories=False, **limits)


class Reply(NamedTuple):
    """What the server answered."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body, or the events of a stream without the last one."""
        if self.is_stream:
            return [json.loads(line) for line in self.data if line != b"[DONE]"]
        return strict_json(self.content)

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.headers.get("content-type") == "text/event-stream"

    @property
    def data(self) -> list[bytes]:
        """What follows `data: ` in each event."""
        return data_of(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails if there is another thing."""
        body = self.json
        assert list(body) == ["error"], body
        return dict(body["error"])

    @property
    def text(self) -> str:
        """Of the first answer, of either kind of body."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """Of all answers."""
        found: dict[int, str] = {}
        for body in self.json if self.is_stream else [self.json]:
            for choice in body["choices"]:
                piece = choice["text"] if "text" in choice else (choice.get("delta") or choice.get("message"))["content"]
                found[choice["index"]] = found.get(choice["index"], "") + piece
        return [found[index] for index in sorted(found)]


class LiveServer:
    """A server of its own engine, in threads of this process.

    Args:
        engine: behind it.
        service: the books.
        log: every event of the engine and the server.
        runner: the device.
    """

    def __init__(self, engine: AsyncLLM, service: Service, log: EventLog, runner: Runner) -> None:
        self.engine, self.service, self.log, self.runner = engine, service, log, runner
        self.counts: Counter[str] = Counter()
        self.num_prompts = self.num_unsure = 0
        self.tracebacks: list[tuple[str, str]] = []
        """Unexpected failures in the log, of this and other servers: the request's id and the text; a test that plants one clears it."""
        self._lock = threading.Lock()
        self._figures: dict[str, float] = {}
        self._forgotten: Counter[tuple[type[events.Event], str]] = Counter()
        self._forgotten_tokens = 0
        self.door = DoorServer(service, create_app(service), read_keys(service.config), tls_context(service.config.server))  # type: ignore[arg-type]
        self.port = self.door.port

    def close(self) -> None:
        """Stops serving."""
        self.door.close()

    def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own; the answer is validated and counted."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} if raw is not None else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, raw, given | dict(headers or {}))
            response = connection.getresponse()
            reply = Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()
        if reply.status == 200 and raw is not None:
            body = json.loads(raw)
        self.take(method, path, reply, (body.get("n") or 1) if isinstance(body, dict) else 1)
        return reply

    def take(self, method: str, path: str, reply: Reply, n: int = 1) -> None:
        """Validates and counts what was answered to a request that another client sent."""
        check_answer(method, path, reply.status, reply.headers, reply.content)
        self._count(method, path, reply, n)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """POST of JSON."""
        return self.request("POST", path, body, headers)

    def get(self, path: str, **headers: str) -> Reply:
        """GET."""
        return self.request("GET", path, None, headers)

    def chat(self, content: Any = "hello", **fields: Any) -> Reply:
        """A conversation of one message, greedy and short unless said otherwise."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Reply:
        """A prompt, greedy and short unless said otherwise."""
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})

    def open(self, path: str, body: Any, *, receive_buffer: int | None = None) -> socket.socket:
        """Sends a request and leaves the answer unread; whoever calls closes the socket, and says so with `left`."""
        raw = json.dumps(body).encode()
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def left(self, number: int = 1) -> None:
        """That many clients have left before their answer was complete."""
        with self._lock:
            self.counts[End.ABORTED] += number
            self.num_unsure += number

    def stream_until(self, path: str, body: Any, is_enough: Callable[[bytes], bool]) -> socket.socket:
        """Opens a stream and reads until the bytes so far are enough."""
        connection, seen = self.open(path, body), b""
        while not is_enough(seen):
            piece = connection.recv(65536)
            assert piece, f"the stream ended: {seen!r}"
            seen += piece
        return connection

    def after_check(self) -> None:
        """Client, server and engine agree on how everything ended, nothing is left, and the engine answers as ever."""
        wait_until(lambda: self.service.ledger.num_open == 0)
        self._settle()
        ends = {end.value: number for end, number in self.service.ledger.ends().items()}
        assert ends == {end.value: self.counts[end.value] for end in End}, "the client counted otherwise than the server"
        logged = self._num_logged()
        assert {end: logged[events.HttpAnswered, end] for end in ends} == ends, "events tell otherwise than the books"
        registry = self.service.metrics.registry
        told = {end: registry.get_sample_value("jaxpaged_http_ends_total", {"end": end}) or 0 for end in ends}
        assert told == ends, "the metrics tell otherwise than the books"
        finished = self.log.of(events.RequestFinished)
        assert sorted(event.request_id for event in finished) == sorted(event.request_id for event in self.log.of(events.RequestQueued))
        assert len(self.log.of(events.RequestReceived)) == len(self.log.of(events.RequestRejected)) + len(finished)
        num_done = logged[events.RequestFinished, "stop"] + logged[events.RequestFinished, "length"] - self._num_further_steps()
        # Who leaves may have had an answer that was complete, but for being sent.
        assert self.num_prompts <= num_done <= self.num_prompts + self.num_unsure
        self._check_figures(ends, logged)
        ours = {event.request_id for event in self.log.of(events.HttpAnswered)}
        assert [text for request_id, text in self.tracebacks if request_id in ours or not request_id] == []
        engine = self.engine._engine
        if not engine.is_dead:
            assert (engine.scheduler.num_running, engine.scheduler.num_waiting, engine.pages.num_in_use) == (0, 0, 0)
            engine.scheduler.check()

    def forget(self) -> None:
        """Right after `after_check`: keeps the counts of all events and not the events, so that what the process holds is the server's."""
        self._forgotten_tokens = self._num_told_tokens()
        self._forgotten = self._num_logged()
        self.log.clear()

    def figures(self) -> dict[str, float]:
        """Every figure that /metrics tells, by name and labels."""
        found = {}
        for family in self.service.metrics.registry.collect():
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
        return found

    def _num_logged(self) -> Counter[tuple[type[events.Event], str]]:
        """How many events there were of each kind, and of answers and ends by how that was."""
        labels = {events.HttpAnswered: "end", events.RequestFinished: "reason"}
        found = ((type(event), getattr(event, labels[type(event)]) if type(event) in labels else "") for event in self.log)
        return self._forgotten + Counter(found)

    def _num_further_steps(self) -> int:
        """Requests of the engine that are steps of beam searches and came to their ends, but for one of each search."""
        done = [event.request_id for event in self.log.of(events.RequestFinished) if event.reason in ("stop", "length")]
        steps = [match for request_id in done if (match := BEAM_STEP.fullmatch(request_id))]
        return len(steps) - len({match[1] for match in steps})

    def _num_told_tokens(self) -> int:
        """Tokens of all answers that have ended."""
        return self._forgotten_tokens + sum(event.num_output_tokens for event in self.log.of(events.RequestFinished))

    def _settle(self) -> None:
        """Returns when the engine has taken and ended all that clients have sent."""
        if not self.engine._engine.is_dead:
            asyncio.run(self.engine.is_sleeping())
        wait_until(lambda: not self.engine._engine.has_work)
        wait_until(lambda: len(self.log.of(events.RequestFinished)) == len(self.log.of(events.RequestQueued)))

    def _check_figures(self, ends: Mapping[str, int], logged: Mapping[tuple[type[events.Event], str], int]) -> None:
        """N2: the figures are those of the books and of the engine's events, none of them ever falls, and at rest nothing runs."""
        figures = self.figures()
        told = {end: figures.get(f"jaxpaged_http_ends_total{{end={end}}}", 0) for end in ends}
        assert told == dict(ends), "figures tell otherwise than the books"
        finished = {label: number for (kind, label), number in logged.items() if kind is events.RequestFinished}
        assert {reason: figures.get(f"jaxpaged_requests_finished_total{{reason={reason}}}") for reason in finished} == finished
        for name, kind in (("received", events.RequestReceived), ("queued", events.RequestQueued)):
            assert figures.get(f"jaxpaged_requests_{name}_total", 0) == logged[kind, ""]
        answered = sum(value for name, value in figures.items() if name.startswith("jaxpaged_http_answers_total"))
        assert answered == sum(number for (kind, _), number in logged.items() if kind is events.HttpAnswered)
        for name, value in self._figures.items():
            if name.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert figures[name] >= value, f"{name} fell"
        if not self.engine._engine.is_dead:
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
                assert figures.get(f"jaxpaged_{name}", 0) == 0, name
        told = self._num_told_tokens()
        assert figures["jaxpaged_generation_tokens_total"] == told, "steps bring other tokens than requests end with"
        assert len(figures) < 1500, "series without a bound"
        self._figures = figures

    def _count(self, method: str, path: str, reply: Reply, n: int) -> None:
        if method != "POST" or path.split("?")[0] not in GENERATION:
            return
        end, num_answers = end_of(reply)
        with self._lock:
            self.counts[end] += 1
            self.num_prompts += num_answers // n
            if end in (End.FAILED, End.REJECTED, End.REFUSED, End.ABORTED):
                self.num_unsure += 256


def end_of(reply: Reply) -> tuple[End, int]:
    """How a client sees that its request ended, and how many answers it got."""
    if reply.status in (429, 503):
        return End.REFUSED, 0
    if reply.status >= 400:
        return (End.REJECTED if reply.status < 500 else End.FAILED), 0
    bodies = reply.json if reply.is_stream else [reply.json]
    if bodies and "choices" not in bodies[-1] and (response := bodies[-1].get("response", bodies[-1])).get("object") == "response":
        ends = {"completed": End.STOP, "incomplete": End.LENGTH, "cancelled": End.ABORTED, "failed": End.FAILED}
        return ends[response["status"]], len(response["output"])
    if "data" in bodies[0]:  # embeddings and scores
        return End.STOP, len(bodies[0]["data"])
    if any(body.get("error") for body in bodies):
        return End.FAILED, 0
    if reply.is_stream and b"[DONE]" not in reply.data:
        raise AssertionError("a stream without an end")
    choices = [choice for body in bodies for choice in body.get("choices", ()) if choice["finish_reason"]]
    reasons = {choice["finish_reason"] for choice in choices}
    prompts = {choice["index"] for choice in choices}
    assert reasons <= {"stop", "length"}
    return (End.LENGTH if "length" in reasons else End.STOP), len(prompts)


@contextlib.contextmanager
def live_server(
    tokenizer: Tokenizer, runner: Runner | None = None, config: Config | None = None, *, eos_token_ids: Sequence[int] = (2,)
) -> Iterator[LiveServer]:
    """A server over a scripted device; the books are checked at the end."""
    config = config or Config(log=LogConfig(level="error"))
    device = runner or talker(tokenizer)

    def make(sinks: Sequence[events.Sink]) -> contextlib.AbstractContextManager[AsyncLLM]:
        return scripted_async_llm(device, tokenizer, eos_token_ids=eos_token_ids, config=config, sinks=sinks)

    with server_over(make, device, config) as server:
        yield server


@contextlib.contextmanager
def server_over(
    make_engine: Callable[[Sequence[events.Sink]], contextlib.AbstractContextManager[AsyncLLM]], runner: Runner, config: Config
) -> Iterator[LiveServer]:
    """A server over an engine that is made with its sinks; the books are checked at the end."""
    log = EventLog()
    service = Service(config, sinks=(log,))
    with make_engine((service.emit,)) as engine:
        service.attach(engine)
        server = LiveServer(engine, service, log, runner)
        with _tracebacks_into(server.tracebacks):
            try:
                yield server
                server.after_check()
            finally:
                server.close()


@contextlib.contextmanager
def _tracebacks_into(found: list[tuple[str, str]]) -> Iterator[None]:
    """Collects what the package writes to the log with a traceback."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and not isinstance(record.exc_info[1], JaxpagedError):
                found.append((str(record.args[0]) if isinstance(record.args, tuple) and record.args else "", self.format(record)))

    handler, logger = Handler(), logging.getLogger("jaxpaged")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def slowed(runner: Runner, seconds: float) -> FailingRunner:
    """The same device, each of whose steps takes so much longer."""
    return FailingRunner(runner, before=lambda _: time.sleep(seconds))
