"""Random sampling parameters of every kind, random company, and what a request should have chosen, by plain numpy.

`MixedRun` lets requests join and leave a batch of 1 to 17 rows at every step; `Alone` answers each of them with nobody beside it.
`choose` is the rule itself, written from docs/sampling.md: it says how near to a tie a choice was, which decides whether two answers
that part count as equal (see `tests/equality.py`).
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxpaged import events
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Intake
from jaxpaged.mailbox import merge_deltas
from jaxpaged.request import CompletionOutput, Request, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.sampling import NO_ID, uniform
from tests.fakes import Bench

NUM_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
"""At and around every bucket edge up to 17 rows."""
LETTERS = "etaoinshrdlu ,.\n"


def random_params(rng: random.Random, *, vocab: int, eos_token_id: int) -> SamplingParams:
    """Any combination of fields that is not refused; each is set in every second request or so."""
    while True:
        try:
            return SamplingParams(**_random_fields(rng, vocab, eos_token_id))
        except InvalidRequestError:
            continue


def _random_fields(rng: random.Random, vocab: int, eos_token_id: int) -> dict[str, Any]:
    def ids(most: int) -> list[int]:
        return rng.sample(range(vocab), rng.randint(1, most))

    def words(most: int) -> list[str]:
        return ["".join(rng.choices(LETTERS, k=rng.choice((1, 1, 1, 2, 3)))) for _ in range(rng.randint(1, most))]

    bias = {index: rng.choice((-100.0, -2.0, 1.0, 3.0, 8.0, 100.0)) for index in ids(6)} | (
        {eos_token_id: 5.0} if rng.random() < 0.5 else {}
    )
    kinds: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0.0, 0.0, 1e-6, 1e-4, 0.3, 0.8, 1.0, 1.5, 5.0)),
        "top_k": lambda: rng.choice((-1, 0, 1, 2, 5, 40, 127, 128, 129, 300, vocab - 1, vocab, 10**9)),
        "top_p": lambda: rng.choice((1.0, 0.999, 0.95, 0.8, 0.5, 0.1, 1e-6)),
        "min_p": lambda: rng.choice((0.0, 0.01, 0.05, 0.3, 1.0)),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice((1.0, 0.5, 0.9, 1.1, 1.5, 3.0)),
        "logit_bias": lambda: bias,
        "allowed_token_ids": lambda: rng.choice((ids(3), ids(200), [eos_token_id], [eos_token_id])),
        "bad_words": lambda: words(6),
        "logprobs": lambda: rng.choice((0, 1, 5, 20)),
        "seed": lambda: rng.choice((-1, 0, 7, rng.getrandbits(63))),
        "stop": lambda: rng.choice((words(12), words(12), words(1)[0])),
        "include_stop_str_in_output": lambda: True,
        "stop_token_ids": lambda: rng.sample(range(vocab), rng.choice((1, 64, 64))),
        "ignore_eos": lambda: True,
        "min_tokens": lambda: rng.randint(0, 8),
        "skip_special_tokens": lambda: False,
        "detokenize": lambda: False,
        "stream_interval": lambda: rng.choice((1, 2, 3, 100)),
        "n": lambda: rng.choice((1, 2, 3)),
    }
    # What changes most answers at once is seldom, so that the others are seen too.
    chances = {"temperature": 0.9, "allowed_token_ids": 0.12, "n": 0.2, "detokenize": 0.1, "stop": 0.35, "stop_token_ids": 0.3}
    fields = {name: make() for name, make in kinds.items() if rng.random() < chances.get(name, 0.35)}
    # Up to the end of the context once in a while.
    return fields | {
        "max_tokens": None if rng.random() < 0.02 else rng.randint(1, 10),
        "output_kind": rng.choice(list(RequestOutputKind)),
    }


def random_requests(rng: random.Random, intake: Intake, count: int, *, vocab: int, max_prompt: int) -> list[Request]:
    """Requests of random parameters; every second prompt begins like others, to meet cached pages."""
    shared = [rng.randrange(3, vocab) for _ in range(max_prompt)]
    (eos_token_id,) = intake.eos_token_ids
    requests = []
    for index in range(count):
        own = [rng.randrange(3, vocab) for _ in range(rng.choice((1, 2, 5, 15, 16, 17)))]
        prompt = [*shared[: rng.choice((0, 0, 8, 16, 17, 32)) if max_prompt > 32 else 0], *own][:max_prompt]
        params = random_params(rng, vocab=vocab, eos_token_id=eos_token_id)
        priority = rng.choice((0, 0, 0, 1))
        requests.append(intake.request(prompt, params, arrival_s=0.0, request_id=f"mix-{index}", priority=priority))
    return requests


def final_outputs(bench: Bench, request: Request) -> list[CompletionOutput]:
    """Every answer of a finished request as a whole, whatever kind of output was asked for."""
    outputs = bench.outputs[request.request_id]
    if request.params.output_kind is not RequestOutputKind.DELTA:
        return outputs[-1].outputs
    joined: RequestOutput = functools.reduce(merge_deltas, outputs)
    return joined.outputs


class MixedRun:
    """Runs requests in company: before each step some join, some leave, and some are preempted.

    Attributes:
        answers: request id -> its answers; those of a request that left are as far as they went.
        num_rows: of each step.
    """

    def __init__(self, bench: Bench, requests: Sequence[Request], rng: random.Random) -> None:
        waiting, present = list(reversed(requests)), dict[str, Request]()
        while waiting or bench.engine.has_work:
            wanted = rng.choice((*NUM_ROWS, 16, 17, 17, 20))
            while waiting and sum(request.params.n for request in present.values()) < wanted:
                request = waiting.pop()
                bench.engine.add(request)
                present[request.request_id] = request
            if present and rng.random() < 0.03:
                bench.abort(rng.choice(list(present)))
            # With a step in flight, the pages of a row are not to be taken from outside.
            if rng.random() < 0.1 and not bench.engine.num_in_flight:
                bench.evict()
            bench.step()
            present = {request_id: request for request_id, request in present.items() if request_id not in bench.last}
        self.num_rows = [event.num_seqs for event in bench.events.of(events.StepFinished)]
        self.answers = {request.request_id: final_outputs(bench, request) for request in requests}


def alone(bench: Bench, request: Request) -> list[CompletionOutput]:
    """The answers of a request that has the engine to itself, told once at the end."""
    params = msgspec.structs.replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY)
    bench.engine.add(msgspec.structs.replace(request, params=params))
    bench.run()
    return bench.last[request.request_id].outputs


class Choice(NamedTuple):
    """The id that follows, and how far the logits or the draw are from another one."""

    token_id: int
    margin: float


def choose(logits: np.ndarray, request: Request, history: Sequence[int]) -> Choice:
    """What `request` (of one answer, parameters resolved) chooses after `history`, in float64.

    Args:
        logits: the model's own, of the ids that the tokenizer knows.
        history: prompt and answer so far.
    """
    params, answer = request.params, list(history[len(request.prompt_token_ids) :])
    assert params.temperature is not None
    assert params.top_p is not None
    assert params.top_k is not None
    assert params.min_p is not None
    shaped = _shape(logits.astype(np.float64), request, answer)
    if not np.isfinite(shaped).any():
        return Choice(NO_ID, math.inf)
    if params.is_greedy:
        first, second = np.sort(shaped)[::-1][:2]
        return Choice(int(shaped.argmax()), float(first - second))
    scaled = (shaped - shaped.max()) / params.temperature
    order = np.sort(scaled)[::-1]
    edges = [math.inf]
    kept = order >= (math.log(params.min_p) if params.min_p else -math.inf)
    if params.min_p:
        edges.append(float(np.abs(order - math.log(params.min_p)).min()))
    if 0 < params.top_k < len(order) and np.isfinite(order[params.top_k - 1]):
        edges.append(float(order[params.top_k - 1] - order[params.top_k]) or math.inf)
        kept &= order >= order[params.top_k - 1]
    mass = np.cumsum(np.where(kept, np.exp(order), 0.0))
    if params.top_p < 1:
        edges.append(float(np.abs(mass / mass[-1] - params.top_p).min()))
        kept &= order >= order[np.searchsorted(mass, params.top_p * mass[-1])]
    shares = np.cumsum(np.where(scaled >= order[kept][-1], np.exp(scaled), 0.0))
    seed = jnp.asarray([[request.seed & 0xFFFFFFFF, request.seed >> 32]], jnp.uint32)
    draw = float(uniform(seed, jnp.asarray([len(history)], jnp.int32))[0])
    chosen = int(np.searchsorted(shares, draw * shares[-1], side="right"))
    edges += [float(abs(shares[index] / shares[-1] - draw)) for index in (chosen - 1, chosen) if index >= 0 and chosen < len(shares) - 1]
    # An error of the logits counts for more the colder the row is.
    return Choice(chosen, min(edges) * min(1.0, params.temperature))


def _shape(logits: np.ndarray, request: Request, answer: list[int]) -> np.ndarray:
    params, vocab = request.params, len(logits)
    if params.allowed_token_ids is not None:
        logits[[index for index in range(vocab) if index not in set(params.allowed_token_ids)]] = -math.inf
    for index, value in (params.logit_bias or {}).items():
        if index < vocab:
            logits[index] += value
    repetition = params.repetition_penalty or 1.0
    for index in {*request.prompt_token_ids, *answer}:
        if index < vocab:
            logits[index] = logits[index] / repetition if logits[index] > 0 else logits[index] * repetition
    for index in set(answer):
        logits[index] -= params.frequency_penalty * answer.count(index) + params.presence_penalty
    banned = {
        word[-1]
        for word in request.bad_words_ids
        if len(answer) >= len(word) - 1 and (answer[len(answer) - len(word) + 1 :] == [*word[:-1]])
    }
    if len(answer) < params.min_tokens:
        banned |= {*request.eos_token_ids, *(params.stop_token_ids or ())}
    logits[[index for index in banned if index < vocab]] = -math.inf
    return logits
