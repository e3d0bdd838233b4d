"""Sends a workload to a server that speaks OpenAI's API, and notes when its tokens come."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from jaxpaged.bench.outcomes import Outcome
from jaxpaged.bench.workloads import Job
from jaxpaged.errors import ConfigError

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_CHARS = 300
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")

type Endpoint = Literal["completions", "chat"]


class Target(NamedTuple):
    """A server: where it is, who asks, and how.

    Attributes:
        url: without /v1.
        model: as the server names it.
        endpoint: completions take token ids, so that prompts are exact; chat takes about as many words.
        extra_body: fields for every request's body.
        timeout_s: for one whole answer.
    """

    url: str
    model: str
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}
    timeout_s: float = 6 * 3600.0


def told_setup(target: Target, now: time.struct_time) -> dict[str, str | None]:
    """What `vllm bench serve` writes of its set-up. Tokens are those of the server's counts: there is no tokenizer."""
    backend = "openai-chat" if target.endpoint == "chat" else "openai"
    told = {"date": time.strftime("%Y%m%d-%H%M%S", now), "endpoint_type": backend, "backend": backend, "label": None}
    return {**told, "model_id": target.model, "tokenizer_id": None}


def find_model(url: str, api_key: str | None) -> str:
    """The first model that the server names.

    Raises:
        ConfigError: no answer, or none that names a model.
    """
    import httpx

    try:
        reply = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from error
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models names no model (status {reply.status_code}); --model says which to ask") from error


def run(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Sends every request when it is due and reads all answers to their ends; outcomes in the order of the jobs.

    Args:
        max_concurrency: requests open at once; more wait, and their times begin when they are sent.
        on_done: called with each outcome as it comes.
    """
    return asyncio.run(_run(target, jobs, max_concurrency, on_done))


async def _run(target: Target, jobs: Sequence[Job], max_concurrency: int | None, on_done: Callable[[Outcome], None]) -> list[Outcome]:
    import httpx

    room = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    timeout = httpx.Timeout(target.timeout_s, connect=CONNECT_TIMEOUT_S)
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=_headers(target.api_key), timeout=timeout, limits=unbounded) as client:
        begun_s = time.perf_counter()

        async def one(job: Job) -> Outcome:
            await asyncio.sleep(max(0.0, begun_s + job.arrival_s - time.perf_counter()))
            async with room:
                outcome = await _ask(client, target, job)
            on_done(outcome)
            return outcome

        return list(await asyncio.gather(*map(one, jobs)))


async def _ask(client: "httpx.AsyncClient", target: Target, job: Job) -> Outcome:
    """One request; a failure of any kind is an outcome with a sentence."""
    import httpx

    path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
    body = msgspec.json.encode(request_body(target, job))
    times_s: list[float] = []
    sent_s, usage = time.perf_counter(), None

    def failed(sentence: str) -> Outcome:
        return Outcome(sent_s, times_s, 0, 0, time.perf_counter(), sentence[:MAX_ERROR_CHARS])

    try:
        async with client.stream("POST", target.url + path, content=body, headers={"content-type": "application/json"}) as reply:
            if reply.status_code != 200:
                return failed(f"status {reply.status_code}: {(await reply.aread())[:MAX_ERROR_CHARS].decode(errors='replace')}")
            async for data in server_sent_events(reply.aiter_raw()):
                now_s = time.perf_counter()
                event = msgspec.json.decode(data)
                if event.get("error"):
                    return failed(f"error in the stream: {event['error']}")
                if _has_tokens(event):
                    times_s.append(now_s)
                usage = event.get("usage") or usage
    except httpx.HTTPError as error:
        return failed(f"{type(error).__name__}: {error}")
    except (msgspec.DecodeError, AttributeError) as error:
        return failed(f"the stream is no JSON of OpenAI's: {error}")
    if usage is None:
        return failed("the stream ended without its token counts (usage)")
    return Outcome(sent_s, times_s, int(usage["prompt_tokens"]), int(usage["completion_tokens"]), time.perf_counter())


def request_body(target: Target, job: Job) -> dict[str, Any]:
    """The JSON body of a request."""
    body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    if target.endpoint == "chat":
        rng = random.Random(job.name)
        text = " ".join(rng.choices(WORDS, k=len(job.prompt)))
        body |= {"messages": [{"role": "user", "content": text}], "max_completion_tokens": job.num_output}
    else:
        body |= {"prompt": job.prompt, "max_tokens": job.num_output}
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | target.extra_body


async def server_sent_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a stream, without the last `[DONE]`; lines end in LF or CRLF, comments are left out."""
    rest = b""
    async for chunk in chunks:
        rest = (rest + chunk).replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data and data != b"[DONE]":
                yield data


def _has_tokens(event: dict[str, Any]) -> bool:
    """Whether an event brings text; the role, the end and the counts do not."""
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in event.get("choices") or ())


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
