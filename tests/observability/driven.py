"""A whole engine on a virtual clock, driven into a state: fake step times, real scheduler, pages, outputs and events."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.clocks import Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import QueueFullError
from jaxpaged.intake import Intake
from jaxpaged.kv_groups import FULL
from jaxpaged.logprobs import StepResult
from jaxpaged.request import SamplingParams
from jaxpaged.scheduler import DEFAULT_POLICY
from jaxpaged.settings import StepLimits
from jaxpaged.slot_rows import SlotRow
from jaxpaged.tokenizer import Tokenizer
from tests.event_log import EventLog
from tests.observability.samples import START_S

VOCAB = 300
PAGE_SIZE = 16
ANSWER_ID = 70


class TimedRunner:
    """A device that says the same id for ever, and takes the time that it is told to.

    Args:
        world: whose clock goes on.
        limits: of a step.
        num_pages: of the pool.
    """

    def __init__(self, world: "World", limits: StepLimits, num_pages: int) -> None:
        self._world, self.limits, self.num_pages = world, limits, num_pages
        self.page_size, self.vocab, self.kv_groups = PAGE_SIZE, VOCAB, (FULL,)

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`. The host's time of a step passes here."""
        self._world.now += self._world.host_s
        bucket = self.limits.bucket_for(num_tokens)
        max_pages = -(-self.limits.max_model_len // PAGE_SIZE)
        return BatchLayout(bucket, self.limits.rows_of(bucket), max_pages, PAGE_SIZE, self.num_pages, self.limits.max_num_seqs)

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`. The device's time passes here."""
        self._world.device_works(layout.num_tokens)
        return StepResult(np.full(layout.num_seqs, ANSWER_ID, np.int32), None, None, None)  # type: ignore[arg-type]

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """See `Runner`."""

    def close(self) -> None:
        """See `Runner`."""


class World:
    """An engine and those who ask it.

    Args:
        tokenizer: for the text of answers.
        seed: of the prompts.
        max_num_seqs, max_num_batched_tokens, num_pages, policy: of the engine.
        step_s, token_s: seconds of a step, and of each place in it.
        host_s: the host's seconds of a step.
        platform, dtype, attention: what the engine says it runs on.
        http_lag_s: seconds that clients take to read an answer that is done; None: nobody asks over HTTP.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        *,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 8192,
        num_pages: int = 2000,
        policy: SchedulerConfig = DEFAULT_POLICY,
        step_s: float = 0.04,
        token_s: float = 0.0,
        host_s: float = 0.001,
        platform: str = "cpu",
        dtype: str = "bfloat16",
        attention: str = "",
        http_lag_s: float | None = None,
    ) -> None:
        self.rng, self.now, self.log = random.Random(seed), 0.0, EventLog()
        self.step_s, self.token_s, self.host_s, self.http_lag_s = step_s, token_s, host_s, http_lag_s
        buckets = tuple(bucket for bucket in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if bucket < max_num_batched_tokens)
        limits = StepLimits(max_model_len, max_num_seqs, max_num_batched_tokens, (*buckets, max_num_batched_tokens))
        self.engine = Engine(
            TimedRunner(self, limits, num_pages),  # type: ignore[arg-type]
            tokenizer,
            enable_prefix_caching=False,
            policy=policy,
            sink=self.log,
            clocks=Clocks(monotonic=lambda: self.now, wall=lambda: START_S + self.now),
        )
        self._intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=VOCAB, seed=0)
        self._to_come: list[tuple[float, int, SamplingParams, Callable[[], None]]] = []
        self._when_done: dict[str, Callable[[], None]] = {}
        self._number = 0
        self._leaving: list[str] = []
        self._at_times: list[tuple[float, Callable[[], None]]] = []
        self.log(
            events.EngineStarted(
                time_s=START_S,
                model="m",
                dtype=dtype,
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                pool_bytes=1,
                weight_bytes=1,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                seconds=1.0,
                num_programs=len(limits.token_buckets),
                platform=platform,
                attention=attention,
            )
        )

    def device_works(self, num_places: int) -> None:
        """A step on the device."""
        self.now += self.step_s + self.token_s * num_places
        due = [entry for entry in self._at_times if entry[0] <= self.now]
        self._at_times = [entry for entry in self._at_times if entry[0] > self.now]
        for _, call in due:
            call()

    def during_step_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Has something happen while the first step after a time is on the device."""
        self._at_times.append((at_s, call))

    def arrive(self, at_s: float, num_prompt: int, num_tokens: int, then: Callable[[], None] = lambda: None, **fields: Any) -> None:
        """A request that comes at a time, what happens at its end, and other fields of its sampling parameters."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **fields})
        self._to_come.append((at_s, num_prompt, params, then))

    def abort_last(self) -> None:
        """The client of the last request leaves, once the step that runs is over."""
        self._leaving.append(f"x{self._number}")

    def arrivals(self, rate: float, from_s: float, to_s: float, prompts: Sequence[int], tokens: Sequence[int]) -> None:
        """Requests that come by chance, so many a second."""
        at_s = from_s
        while (at_s := at_s + self.rng.expovariate(rate)) < to_s:
            self.arrive(at_s, self.rng.choice(prompts), self.rng.choice(tokens))

    def clients(
        self, number: int, until_s: float, prompts: Sequence[int], tokens: Sequence[int], *, think_s: float = 0.0, from_s: float = 0.0
    ) -> None:
        """Clients that ask again as soon as they have their answer, or a little later."""

        def ask() -> None:
            if self.now < until_s:
                rest_s = self.rng.expovariate(1 / think_s) if think_s else 0.0
                self.arrive(self.now + rest_s, self.rng.choice(prompts), self.rng.choice(tokens), ask)

        for index in range(number):
            self.arrive(from_s + index * 0.01, self.rng.choice(prompts), max(2, int(self.rng.choice(tokens) * self.rng.random())), ask)

    def run(self, until_s: float) -> list[events.Event]:
        """Lets time pass until then, or until nothing is left; returns all events."""
        while self.now < until_s:
            self._let_in()
            if self.engine.has_work:
                for output in self.engine.step():
                    if output.finished:
                        self._finished(output.request_id)
                while self._leaving:
                    self.engine.abort(self._leaving.pop())
            elif self._to_come:
                self.now = max(self.now, min(entry[0] for entry in self._to_come))
            else:
                break
        return list(self.log)

    def _let_in(self) -> None:
        due = sorted((entry for entry in self._to_come if entry[0] <= self.now), key=lambda entry: entry[0])
        if not due:
            return
        self._to_come = [entry for entry in self._to_come if entry[0] > self.now]
        for at_s, num_prompt, params, then in due:
            self._number += 1
            request_id = f"x{self._number}"
            request = self._intake.request([60] * num_prompt, params, arrival_s=at_s, request_id=request_id)
            try:
                self.engine.add(request)
            except QueueFullError:
                then()
            else:
                self._when_done[request_id] = then

    def _finished(self, request_id: str) -> None:
        if self.http_lag_s is not None:
            ended = next(event for event in reversed(self.log) if isinstance(event, events.RequestFinished))
            lag_s = self.http_lag_s * (0.5 + self.rng.random())
            self.answered(request_id, ended.e2e_s + lag_s)
        self._when_done.pop(request_id)()

    def answered(self, request_id: str, seconds: float, *, end: str = "length", path: str = "/v1/completions", status: int = 200) -> None:
        """An answer over HTTP."""
        fields: dict[str, Any] = {"method": "POST", "code": "", "num_prompt_tokens": 1, "num_output_tokens": 1, "first_token_s": None}
        time_s = START_S + self.now
        self.log(events.HttpAnswered(time_s=time_s, request_id=request_id, path=path, status=status, end=end, seconds=seconds, **fields))
