"""How many events the HTTP layer sends: streams of an engine that takes no time, one token each at every step.

    python scripts/bench_http.py [--streams 256] [--step-ms 10] [--seconds 10]

The server runs in a process of its own over an engine without a model, which wakes the event loop once a step. Clients, in this process,
read all streams and note when events come. Deltas are merged where the loop does not keep up, so that events get fewer while no token is
lost. Printed: events and tokens a second, CPU time of the server's process for an event, gaps between events of a stream, and how long
`/health` takes meanwhile. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import Config, LogConfig
from jaxpaged.engine_client import Generation
from jaxpaged.mailbox import Mailbox
from jaxpaged.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams
from server.app import create_app
from server.auth import ApiKeys
from server.front import behind_front
from server.http_server import HttpServer
from server.listeners import bind_port
from server.service import Service
from tests.text.vocabularies import byte_level

WORD = " word"


class PacedEngine:
    """Gives every open request a token at each step."""

    max_model_len = 1_000_000

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._open: dict[str, tuple[Mailbox, int]] = {}
        self._tokenizer = byte_level()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None, *, priority: int = 0
    ) -> Generation:
        """See `EngineClient`."""
        return Generation(lambda _: self._outputs(params or SamplingParams(), str(request_id)))

    async def prompt_ids(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient`."""
        return [5, 6, 7]

    def get_tokenizer(self) -> Any:
        """See `EngineClient`."""
        return self._tokenizer

    def check_health(self) -> None:
        """See `EngineClient`."""

    async def probe(self) -> None:
        """See `EngineClient`."""

    async def _outputs(self, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        mailbox = Mailbox(asyncio.get_running_loop(), is_delta=True)
        self._open[request_id] = (mailbox, params.max_tokens or 1)
        try:
            while True:
                output = await mailbox.get()
                yield output
                if output.finished:
                    return
        finally:
            self._open.pop(request_id, None)

    def _run(self) -> None:
        step, due_s = 0, time.monotonic()
        while True:
            step, due_s = step + 1, due_s + self._step_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            puts = []
            for request_id, (mailbox, left) in list(self._open.items()):
                self._open[request_id] = (mailbox, left - 1)
                if left <= 0:
                    continue
                reason = FinishReason.LENGTH if left == 1 else None
                completion = CompletionOutput(text=WORD, token_ids=[step % 200 + 3], finish_reason=reason)
                puts.append(
                    (
                        mailbox,
                        RequestOutput(
                            request_id=request_id,
                            prompt=None,
                            prompt_token_ids=[5, 6, 7],
                            outputs=[completion],
                            finished=left == 1,
                            metrics=RequestMetrics(arrival_s=0.0, first_token_s=0.0),
                        ),
                    )
                )
            if puts:
                puts[0][0].loop.call_soon_threadsafe(_deliver, puts)


def _deliver(puts: list[tuple[Mailbox, RequestOutput]]) -> None:
    for mailbox, output in puts:
        mailbox.put(output)


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(step_s: float, pipe: Connection) -> None:
    """The server's process: tells its port, serves until asked, and tells the CPU seconds that took."""
    service = Service(Config(log=LogConfig(level="error")))
    engine: Any = PacedEngine(step_s)
    service.attach(engine)

    async def main() -> None:
        sockets = bind_port("127.0.0.1", 0)
        server = HttpServer(behind_front(create_app(service), service, ApiKeys(())), service.config.server, sockets)
        running = asyncio.create_task(server.serve())
        await server.is_listening.wait()
        before_s = cpu_s()
        pipe.send(sockets[0].getsockname()[1])
        while not pipe.poll():
            await asyncio.sleep(0.02)
        pipe.recv()
        pipe.send(cpu_s() - before_s)
        server.should_exit = True
        await running

    asyncio.run(main())


class Reader(asyncio.Protocol):
    """A client of one stream: counts events, and notes when they come."""

    def __init__(self, path: str, body: bytes, done: asyncio.Event) -> None:
        self._path, self._body, self._done = path, body, done
        self.times_s: list[float] = []
        self.num_events = self.num_tokens = 0
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        text = self._rest + data
        whole, _, self._rest = text.rpartition(b"\n\n")
        num = whole.count(b"data: {")
        if num:
            self.num_events += num
            self.num_tokens += whole.count(WORD.encode())
            self.times_s.append(time.monotonic())
        if b"[DONE]" in text:
            self._done.set()
            self._transport.close()


async def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Opens all streams, reads them to their ends, and asks for health meanwhile."""
    loop = asyncio.get_running_loop()
    num_tokens = int(options.seconds * 1000 / options.step_ms)
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    dones = [asyncio.Event() for _ in range(options.streams)]
    began_s = time.monotonic()
    readers = []
    for done in dones:
        _, reader = await loop.create_connection(lambda done=done: Reader("/v1/completions", body, done), "127.0.0.1", port)
        readers.append(reader)
    health_s: list[float] = []

    async def ask_health() -> None:
        while True:
            asked_s = time.monotonic()
            stream, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await stream.read()
            writer.close()
            health_s.append(time.monotonic() - asked_s)
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask_health())
    await asyncio.gather(*(done.wait() for done in dones))
    seconds = time.monotonic() - began_s
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    gaps_s = sorted(after - before for reader in readers for before, after in zip(reader.times_s, reader.times_s[1:], strict=False))
    events = sum(reader.num_events for reader in readers)
    tokens = sum(reader.num_tokens for reader in readers)
    assert tokens == num_tokens * options.streams, "tokens were lost"
    health_s.sort()
    return {
        "streams": options.streams,
        "step_ms": options.step_ms,
        "seconds": round(seconds, 2),
        "events_per_s": round(events / seconds),
        "tokens_per_s": round(tokens / seconds),
        "merged_percent": round(100 * (1 - events / tokens), 1),
        "gap_p50_ms": round(1000 * gaps_s[len(gaps_s) // 2], 2),
        "gap_p99_ms": round(1000 * gaps_s[int(len(gaps_s) * 0.99)], 2),
        "health_p50_ms": round(1000 * health_s[len(health_s) // 2], 1),
        "health_p99_ms": round(1000 * health_s[int(len(health_s) * 0.99)], 1),
        "events": events,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(options.step_ms / 1000, theirs), daemon=True)
    process.start()
    result = asyncio.run(measure(ours.recv(), options))
    ours.send("end")
    result["server_cpu_us_per_event"] = round(1e6 * ours.recv() / result.pop("events"), 1)
    process.join(10)
    for name, value in result.items():
        print(f"{name:<26}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
