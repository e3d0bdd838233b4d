"""What the HTTP layer costs: the same streams of a real model through `AsyncLLM` and over HTTP, by turns in one process.

    python scripts/bench_http_model.py [--streams 16] [--tokens 64] [--rounds 5] [--model smollm2-135m]

Clients over HTTP are a process of their own. Printed are, of both ways, the median tokens per second, the median processor time of this
process for a token, and the median number of the engine's steps: clients that come one after another are served in more of them. Then by how
much the second way takes longer, more processor time, and more for each step; the last line is JSON. Rounds alternate, so that what else the
machine does falls on both.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import CompilationConfig, Config, LogConfig, ModelConfig, SchedulerConfig
from jaxpaged.request import SamplingParams
from server.app import create_app
from server.auth import ApiKeys
from server.front import behind_front
from server.http_server import HttpServer
from server.listeners import bind_port
from server.service import Service


def prompt_of(index: int) -> list[int]:
    """Few token ids, different for each stream and round: over HTTP they arrive one by one, and prompts would count, not streams."""
    return [10 + (index * 37 + place * (11 + index)) % 250 for place in range(4)]


async def directly(engine: AsyncLLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for all streams."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> None:
        async for _ in engine.stream({"prompt_token_ids": prompt}, params):
            pass

    began_s = time.monotonic()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return time.monotonic() - began_s


async def one_client(port: int, prompt: list[int], num_tokens: int) -> int:
    """Reads a stream to its end; the number of its events."""
    body = json.dumps({"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ("POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json")
    head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
    writer.write(head.encode() + body)
    content = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in content, content[-300:]
    return content.count(b"data: {")


def clients(pipe: Connection, port: int) -> None:
    """A process that runs rounds of clients when told, and says how long each took."""

    async def all_of(prompts: list[list[int]], num_tokens: int) -> float:
        began_s = time.monotonic()
        await asyncio.gather(*(one_client(port, prompt, num_tokens) for prompt in prompts))
        return time.monotonic() - began_s

    while (asked := pipe.recv()) is not None:
        pipe.send(asyncio.run(all_of(*asked)))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    config = Config(
        model=ModelConfig(model=options.model, max_model_len=1024),
        scheduler=SchedulerConfig(max_num_seqs=options.streams, max_num_batched_tokens=128),
        compilation=CompilationConfig(token_buckets=(16, 32, 64, 128)),
        log=LogConfig(level="error"),
    )
    num_steps = 0

    class Steps:
        """Counts them."""

        def __call__(self, event: events.Event, /) -> None:
            nonlocal num_steps
            num_steps += isinstance(event, events.StepFinished)

        def close(self) -> None:
            """See `events.Sink`."""

    service = Service(config, sinks=(Steps(),))
    with AsyncLLM(config=config, sinks=[service.emit]) as engine:
        service.attach(engine)
        sockets = bind_port("127.0.0.1", 0)
        server = HttpServer(behind_front(create_app(service), service, ApiKeys(())), config.server, sockets)
        serving = threading.Thread(target=lambda: asyncio.run(server.serve()))
        serving.start()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=clients, args=(theirs, sockets[0].getsockname()[1]), daemon=True)
        process.start()
        theirs.close()  # so that the end of a client that fails is noticed
        seconds: dict[str, list[float]] = {"async_llm": [], "http": []}
        cpu: dict[str, list[float]] = {"async_llm": [], "http": []}
        steps: dict[str, list[int]] = {"async_llm": [], "http": []}
        for round_ in range(options.rounds + 1):
            for way in seconds if round_ % 2 else reversed(list(seconds)):
                first = (2 * round_ + (way == "http")) * options.streams
                prompts = [prompt_of(first + index) for index in range(options.streams)]
                cpu_s, steps_before = time.process_time(), num_steps
                if way == "http":
                    ours.send((prompts, options.tokens))
                    took_s = ours.recv()
                else:
                    took_s = asyncio.run(directly(engine, prompts, options.tokens))
                cpu_s = time.process_time() - cpu_s
                print(f"round {round_}: {way} {took_s:.2f} s, processor {cpu_s:.2f} s", file=sys.stderr)
                if round_:  # the first one warms up
                    seconds[way].append(took_s)
                    cpu[way].append(cpu_s)
                    steps[way].append(num_steps - steps_before)
        ours.send(None)
        process.join(10)
        server.should_exit = True
        serving.join(10)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    cpu_medians = {way: statistics.median(values) for way, values in cpu.items()}
    per_step = {way: statistics.median(c / n for c, n in zip(cpu[way], steps[way], strict=True)) for way in cpu}
    num_tokens = options.streams * options.tokens
    result = {
        "streams": options.streams,
        "tokens": options.tokens,
        "rounds": options.rounds,
        **{f"{way}_tokens_per_s": round(num_tokens / value, 1) for way, value in medians.items()},
        "http_slower_percent": round(100 * (medians["http"] / medians["async_llm"] - 1), 1),
        **{f"{way}_cpu_ms_per_token": round(1000 * value / num_tokens, 3) for way, value in cpu_medians.items()},
        "http_more_cpu_percent": round(100 * (cpu_medians["http"] / cpu_medians["async_llm"] - 1), 1),
        **{f"{way}_steps": statistics.median(values) for way, values in steps.items()},
        "http_more_cpu_per_step_percent": round(100 * (per_step["http"] / per_step["async_llm"] - 1), 1),
        "spread_percent": {way: round(100 * (max(values) / min(values) - 1), 1) for way, values in seconds.items()},
    }
    for name, value in result.items():
        print(f"{name:<26}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
