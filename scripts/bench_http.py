"""How many events the HTTP layer sends: streams of an engine that takes no time, one token each at every step.

    python scripts/bench_http.py [--streams 256] [--step-ms 10] [--seconds 10] [--chat] [--lockstep]

The server runs in a process of its own over an engine without a model, which wakes the event loop once a step. Clients, in this process,
read all streams from plain sockets and note when events come. Deltas are merged where the loop does not keep up, so that events get fewer
while no token is lost. Printed, of the time in which all streams are open: events a second, gaps between events of a stream, CPU time for
an event of the event loop's thread and of the whole server's process (with the engine's thread, which makes the tokens), and how long
`/health` takes meanwhile, asked by a third process. The last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import re
import select
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import Config, LogConfig
from jaxpaged.engine_client import Generation
from jaxpaged.mailbox import Mailbox
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams
from server.app import create_app
from server.auth import ApiKeys
from server.front import behind_front
from server.http_server import HttpServer
from server.listeners import bind_port
from server.service import Service
from server.serving import calm_garbage_collector
from tests.text.vocabularies import byte_level

WORD = " word"


class PacedEngine:
    """Gives every open request a token at each step, once so many are open; `waits`: not before the last one was sent."""

    max_model_len = 1_000_000

    def __init__(self, step_s: float, num_streams: int, *, waits: bool) -> None:
        self._step_s, self._num_streams, self._waits = step_s, num_streams, waits
        self._open: dict[str, tuple[Mailbox, int]] = {}
        self._tokenizer = byte_level()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> Generation:
        """See `EngineClient`."""
        return Generation(lambda _: self._outputs(params or SamplingParams(), str(request_id)))

    async def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """See `EngineClient`."""
        return [5, 6, 7]

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
        while len(self._open) < self._num_streams:
            time.sleep(0.01)
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
                loop = puts[0][0].loop
                loop.call_soon_threadsafe(_deliver, puts)
                if self._waits:
                    asyncio.run_coroutine_threadsafe(_sent(), loop).result()


def _deliver(puts: list[tuple[Mailbox, RequestOutput]]) -> None:
    for mailbox, output in puts:
        mailbox.put(output)


async def _sent() -> None:
    """Returns when the streams have had their turns."""
    for _ in range(8):
        await asyncio.sleep(0)


class Cpu(NamedTuple):
    """CPU seconds so far: of the whole process, and of the thread that asks, which is the event loop's."""

    process_s: float
    loop_s: float


def cpu_now() -> Cpu:
    """Called on the event loop."""
    return Cpu(time.process_time(), time.thread_time())


def serve(step_s: float, num_streams: int, waits: bool, pipe: Connection) -> None:
    """The server's process: tells its port, serves until asked, and tells the CPU seconds from when all streams had begun."""
    service = Service(Config(log=LogConfig(level="error")))
    engine: Any = PacedEngine(step_s, num_streams, waits=waits)
    service.attach(engine)

    async def word_of_client() -> None:
        while not pipe.poll():
            await asyncio.sleep(0.02)
        pipe.recv()

    async def main() -> None:
        sockets = bind_port("127.0.0.1", 0)
        server = HttpServer(behind_front(create_app(service), service, ApiKeys(())), service.config.server, sockets)
        running = asyncio.create_task(server.serve())
        await server.is_listening.wait()
        calm_garbage_collector()  # as `jaxpaged serve` does when the engine is there
        pipe.send(sockets[0].getsockname()[1])
        await word_of_client()
        before = cpu_now()
        await word_of_client()
        after = cpu_now()
        pipe.send(Cpu(after.process_s - before.process_s, after.loop_s - before.loop_s))
        await word_of_client()
        server.should_exit = True
        await running

    asyncio.run(main())


def ask_health(port: int, pipe: Connection) -> None:
    """A process that asks for health until told to stop, and tells the seconds of each answer."""
    took_s: list[float] = []
    pipe.send("ready")
    pipe.recv()  # all streams have begun
    while not took_s or not pipe.poll(0.05):
        asked_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while connection.recv(65536):
                pass
        took_s.append(time.monotonic() - asked_s)
    pipe.send(took_s)


class Stream:
    """A client of one stream: counts events, and notes when they come."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        self.socket.setblocking(False)
        self.times_s: list[float] = []
        self.num_events = 0
        self._last = b""
        self.num_tokens: int | None = None
        """What the last event says; None: it has not come."""

    def read(self) -> bool:
        """Takes what is there; whether it was the end."""
        data = self.socket.recv(65536)
        assert data, "the server closed"
        self.num_events += data.count(b"\n\n")
        self.times_s.append(time.monotonic())
        before, self._last = self._last, data
        if b"[DONE]" not in data:
            return False
        found = re.search(rb'"completion_tokens":(\d+)', before + data)
        assert found, "a stream without its counts"
        self.num_tokens = int(found[1])
        return True


def measure(port: int, options: argparse.Namespace, server: Connection, health: Connection) -> dict[str, Any]:
    """Opens all streams and reads them to their ends."""
    num_tokens = int(options.seconds * 1000 / options.step_ms)
    body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": "x"}]} if options.chat else {"prompt": "x"}
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    calm_garbage_collector()  # the clients' pauses are not the server's
    poll = select.epoll()
    by_number: dict[int, Stream] = {}
    for _ in range(options.streams):
        stream = Stream(port, path, json.dumps(body).encode())
        by_number[stream.socket.fileno()] = stream
        poll.register(stream.socket.fileno(), select.EPOLLIN)
    streams = list(by_number.values())
    num_open, begun_s, num_before = len(streams), None, 0
    while num_open:
        for number, _ in poll.poll():
            if by_number[number].read():
                poll.unregister(number)
                num_open -= 1
                if num_open == len(streams) - 1:
                    server.send("the first one has ended")
                    ended_s, num_after = time.monotonic(), sum(stream.num_events for stream in streams)
        if begun_s is None and all(stream.num_events for stream in streams):
            for pipe in (server, health):
                pipe.send("all have begun")
            begun_s, num_before = time.monotonic(), sum(stream.num_events for stream in streams)
    for stream in streams:
        stream.socket.close()
    assert begun_s is not None, "streams ended before all had begun: give it more seconds"
    health.send("end")
    health_s, cpu = sorted(health.recv()), server.recv()
    server.send("end")
    assert all(stream.num_tokens == num_tokens for stream in streams), "tokens were lost"
    times_s = [[moment for moment in stream.times_s if begun_s <= moment <= ended_s] for stream in streams]
    gaps_s = sorted(after - before for times in times_s for before, after in itertools.pairwise(times))
    seconds, events = ended_s - begun_s, num_after - num_before
    num_told = sum(stream.num_events - 2 for stream in streams)  # the counts and the end are no tokens
    return {
        "streams": options.streams,
        "step_ms": options.step_ms,
        "seconds": round(seconds, 2),
        "events_per_s": round(events / seconds),
        "merged_percent": round(100 * (1 - num_told / (num_tokens * len(streams))), 1),
        "gap_p50_ms": round(1000 * gaps_s[len(gaps_s) // 2], 2),
        "gap_p99_ms": round(1000 * gaps_s[int(len(gaps_s) * 0.99)], 2),
        "health_p50_ms": round(1000 * health_s[len(health_s) // 2], 1),
        "health_p99_ms": round(1000 * health_s[int(len(health_s) * 0.99)], 1),
        "loop_cpu_us_per_event": round(1e6 * cpu.loop_s / events, 1),
        "server_cpu_us_per_event": round(1e6 * cpu.process_s / events, 1),
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--lockstep", action="store_true", help="no step before the last one is sent: nothing is merged, whoever lags")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(options.step_ms / 1000, options.streams, options.lockstep, theirs), daemon=True)
    server.start()
    port = ours.recv()
    to_health, of_health = context.Pipe()
    asking = context.Process(target=ask_health, args=(port, of_health), daemon=True)
    asking.start()
    to_health.recv()
    result = measure(port, options, ours, to_health)
    for process in (asking, server):
        process.join(10)
    for name, value in result.items():
        print(f"{name:<26}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
