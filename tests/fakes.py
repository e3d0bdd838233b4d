"""Stand-ins for the model's device, and the bench that drives an engine and checks it after every step.

SCRIPT   `ScriptRunner`: a runner without a model; the next id is a function of the row's history, which it reads back through the
         row's page table from what earlier steps wrote, so that a page given to two owners or read too early shows in the ids.
FAIL     `FailingRunner`: any runner, with a step that raises or sleeps, or a row that comes back without an id.
NARROW   `NarrowRunner` gives a compiled model smaller limits, so that one start serves engines with other budgets, chunks and pools.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import JaxpagedError
from jaxpaged.intake import Intake, Prompt
from jaxpaged.kv_groups import FULL
from jaxpaged.logprobs import StepResult
from jaxpaged.model_runner import Runner
from jaxpaged.request import RequestOutput, SamplingParams
from jaxpaged.sampling import NO_ID
from jaxpaged.scheduler import DEFAULT_POLICY
from jaxpaged.settings import StepLimits
from jaxpaged.slot_rows import SlotRow
from jaxpaged.step_draft import StepDraft
from jaxpaged.tokenizer import Tokenizer
from tests.event_log import EventLog
from tests.script import History, allowed_id, follow, free_talk, pooled_rows, scored_tokens, script_result

__all__ = ["follow", "free_talk"]

NEVER_WRITTEN = -7
MAX_STEPS = 5_000


def read_blob(blob: np.ndarray, layout: BatchLayout) -> dict[str, np.ndarray]:
    """The arrays of a packed step by name, all as int32; written apart from the code that packs."""
    arrays, start = {}, 0
    for name, shape in layout.fields:
        end = start + int(np.prod(shape))
        arrays[name] = blob[start:end].reshape(shape)
        start = end
    assert start == blob.size, "the blob has another size than its layout says"
    return arrays


class ScriptRunner:
    """A device that stores token ids in its pages instead of keys and values.

    Every step is checked: live tokens go to pages of the pool other than page 0, each place at most once a step; padding goes
    beyond the pool; and a row reads back exactly the positions 0, 1, 2, ... that earlier steps wrote for it.

    What `next_id` says is where the logits peak (see `tests/script.py`): end tokens before `min_tokens`, bad words, biases and allowed
    ids count; temperature, penalties and the like do not. `by_seed`, in its place, is also given the row's seed.
    """

    def __init__(
        self,
        next_id: Callable[[History], int] = lambda _: 0,
        *,
        by_seed: Callable[[History, int], int] | None = None,
        vocab: int,
        page_size: int = 16,
        num_pages: int = 65,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        keeps_histories: bool = True,
    ) -> None:
        self.next_id, self.by_seed, self._keeps_histories = next_id, by_seed, keeps_histories
        buckets = tuple(bucket for bucket in (2, 4, 8, 16, 32, 64, 128, 256) if bucket < max_num_batched_tokens)
        self.limits = StepLimits(max_model_len, max_num_seqs, max_num_batched_tokens, (*buckets, max(2, max_num_batched_tokens)))
        self.page_size, self.num_pages, self.vocab, self.kv_groups = page_size, num_pages, vocab, (FULL,)
        self.ids = np.full((num_pages, page_size), NEVER_WRITTEN)
        self.positions = np.full((num_pages, page_size), NEVER_WRITTEN)
        self.histories: list[list[History]] = []
        self.last_ids = [NEVER_WRITTEN] * max_num_seqs
        self.num_closed = 0
        self.slot_rows: dict[int, SlotRow] = {}

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """See `Runner`."""
        self.slot_rows[slot] = row

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`."""
        bucket = self.limits.bucket_for(num_tokens)
        max_pages = -(-self.limits.max_model_len // self.page_size)
        return BatchLayout(bucket, self.limits.rows_of(bucket), max_pages, self.page_size, self.num_pages, self.limits.max_num_seqs)

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """Writes the step's tokens, reads every row's history and answers it."""
        step = read_blob(blob, layout)
        ends, num_tokens = step["cu_q_lens"], int(step["cu_q_lens"][-1])
        assert num_tokens <= layout.num_tokens
        places = list(zip(step["write_pages"][0].tolist(), step["write_offsets"].tolist(), strict=True))
        assert all(0 < page < self.num_pages for page, _ in places[:num_tokens]), "a live token goes to page 0 or beyond the pool"
        assert all(page >= self.num_pages for page, _ in places[num_tokens:]), "padding goes into the pool"
        assert len(set(places)) == len(places), "two tokens go to one place"
        slots = step["source_slots"].tolist()
        token_ids = [self.last_ids[slot] if slot >= 0 else token for slot, token in zip(slots, step["token_ids"].tolist(), strict=True)]
        for place, token_id, position in zip(places[:num_tokens], token_ids, step["positions"].tolist(), strict=False):
            self.ids[place], self.positions[place] = token_id, position
        out = np.full(layout.num_seqs, NO_ID, np.int32)
        scripted = np.zeros_like(out)
        histories: list[History] = []
        for row in range(layout.num_seqs):
            length = int(step["kv_lens"][row])
            if length == 0:
                assert ends[row] == ends[row + 1], "a row without history has tokens"
                continue
            assert ends[row] < ends[row + 1] == step["sample_tokens"][row] + 1, "a row does not sample its last token"
            pages = step["page_tables"][0, row, : -(-length // self.page_size)]
            positions = self.positions[pages].reshape(-1)[:length]
            assert positions.tolist() == list(range(length)), f"row {row} reads pages that are not its own: {positions.tolist()}"
            histories.append(tuple(self.ids[pages].reshape(-1)[:length].tolist()))
            slot = int(step["target_slots"][row])
            scripted[row] = self._scripted(histories[-1], step["seed"][row])
            bias = self.slot_rows[slot] if slot < layout.num_slots and step["has_bias"][row] else None
            out[row] = allowed_id(int(scripted[row]), self.vocab, step["banned_ids"][row].tolist(), bias)
            if slot < layout.num_slots:
                self.last_ids[slot] = int(out[row])
        if self._keeps_histories:
            self.histories.append(histories)
        prompt = scored_tokens(step, histories, self._scripted)
        return script_result(out, scripted, step["num_logprobs"], self.vocab, prompt, pooled_rows(step, histories))

    def _scripted(self, history: History, seed: np.ndarray) -> int:
        if self.by_seed is None:
            return self.next_id(history)
        low, high = seed.view(np.uint32).tolist()
        return self.by_seed(history, low | high << 32)

    def close(self) -> None:
        """See `Runner`."""
        self.num_closed += 1


class FailingRunner:
    """Another runner with faults.

    Args:
        inner: what really runs.
        before: called with the number of the step (from 1) before it runs; may raise or sleep.
        without_id: whether a row of a step comes back with no id, as a row of NaN does: (step, row) -> bool.
    """

    def __init__(
        self,
        inner: Runner,
        *,
        before: Callable[[int], None] = lambda _: None,
        without_id: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        self.inner, self.before, self.without_id = inner, before, without_id
        self.limits, self.page_size, self.num_pages, self.vocab = inner.limits, inner.page_size, inner.num_pages, inner.vocab
        self.kv_groups = inner.kv_groups
        self.num_steps = 0

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """See `Runner`."""
        self.inner.write_slot(slot, row)

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`."""
        return self.inner.layout_for(num_tokens)

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        self.num_steps += 1
        self.before(self.num_steps)
        result = self.inner.run(layout, blob)
        ids = np.array(result)
        spoiled = [row for row in range(len(ids)) if self.without_id(self.num_steps, row)]
        ids[spoiled] = NO_ID
        return result._replace(ids=ids)

    def close(self) -> None:
        """See `Runner`."""
        self.inner.close()


class NarrowRunner:
    """A runner with smaller limits or fewer pages than the compiled one under it; closing it leaves that one open.

    Args:
        inner: the compiled runner.
        num_pages: pages that the engine may use, page 0 included; None: all.
        after: called after each step.
        limits: fields of `StepLimits` to lower.
    """

    def __init__(self, inner: Runner, *, num_pages: int | None = None, after: Callable[[], None] = lambda: None, **limits: int) -> None:
        assert all(value <= getattr(inner.limits, name) for name, value in limits.items())
        self.inner, self.after, self.limits = inner, after, inner.limits._replace(**limits)
        self.page_size, self.vocab, self.kv_groups = inner.page_size, inner.vocab, inner.kv_groups
        self.num_pages = inner.num_pages if num_pages is None else num_pages
        assert self.num_pages <= inner.num_pages

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """See `Runner`."""
        self.inner.write_slot(slot, row)

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`."""
        return self.inner.layout_for(num_tokens)

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        ids: StepResult = self.inner.run(layout, blob)
        self.after()
        return ids

    def close(self) -> None:
        """Nothing: the compiled runner belongs to somebody else."""


class Canary(NamedTuple):
    """A greedy request, and what it answers while nothing is wrong."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    text: str


class Bench:
    """An engine, its door and its events. Steps are followed by `Scheduler.check`; `after_check` is the one of the field cases.

    Args:
        runner: the device.
        tokenizer: the model's.
        eos_token_ids: end tokens of the model.
        enable_prefix_caching: as for `Engine`.
        policy: as for `Engine`.
        max_in_flight: as for `Engine`; None: `default_in_flight`, which the fixture `in_flight` sets.
        canary: what the canary answered when the device was new; None asks it now.
        canary_prompt: what the canary asks.
        canary_tokens: how long it answers.
    """

    default_in_flight = 1

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        enable_prefix_caching: bool = True,
        policy: SchedulerConfig = DEFAULT_POLICY,
        max_in_flight: int | None = None,
        canary: Canary | None = None,
        canary_prompt: Prompt = (5, 6, 7, 8),
        canary_tokens: int = 16,
    ) -> None:
        self.events = EventLog()
        self.runner, self.tokenizer = runner, tokenizer
        self.engine = Engine(
            runner,
            tokenizer,
            enable_prefix_caching=enable_prefix_caching,
            max_in_flight=max_in_flight or self.default_in_flight,
            policy=policy,
            sink=self.events,
        )
        self.intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset(eos_token_ids), vocab=runner.vocab, seed=0)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.canary = canary or Canary(canary_prompt, (), "")
        if canary is None:
            answer = self.ask(canary_prompt, max_tokens=canary_tokens, ignore_eos=True).outputs[0]
            self.canary = Canary(canary_prompt, tuple(answer.token_ids), answer.text)

    @property
    def pages(self) -> Any:
        """The engine's page manager."""
        return self.engine.pages

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0, **fields: Any
    ) -> str:
        """Queues a request, greedy unless said otherwise, and returns its id. Raises as intake and engine do."""
        params = params or SamplingParams(**{"temperature": 0.0, **fields})
        arrival_s = self.engine.clocks.monotonic()
        request = self.intake.request(prompt, params, arrival_s=arrival_s, request_id=request_id, priority=priority)
        self.engine.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One step and the checks after it; with a dead engine, the error outputs of those that were open, and the error goes on."""
        try:
            outputs = self.engine.step()
        except JaxpagedError:
            self._take(self.engine.drain_failed())
            raise
        self.engine.scheduler.check()
        self._take(outputs)
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Aborts a request and checks the books."""
        output = self.engine.abort(request_id)
        if output is not None:
            self._take([output])
        self.engine.scheduler.check()
        return output

    def evict(self) -> None:
        """Preempts the request admitted last, as a step does that finds no page."""
        scheduler = self.engine.scheduler
        victim = scheduler._running.victim()
        if victim is not None:
            scheduler._rows.preempt(victim, StepDraft())
        self.engine.scheduler.check()

    def run(self) -> None:
        """Steps until nothing is left."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"requests are left after {MAX_STEPS} steps")

    def ask(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> RequestOutput:
        """Adds a request, runs until nothing is left and returns its last output."""
        request_id = self.add(prompt, params, **fields)
        self.run()
        return self.last[request_id]

    def ids(self, request_id: str) -> list[int]:
        """The answer's ids of a finished request."""
        return self.last[request_id].outputs[0].token_ids

    def text(self, request_id: str) -> str:
        """The answer's text of a finished request."""
        return self.last[request_id].outputs[0].text

    def deltas(self, request_id: str) -> list[str]:
        """The text of each output, in order."""
        return [output.outputs[0].text for output in self.outputs[request_id]]

    def after_check(self) -> None:
        """What must hold when nothing runs, whatever happened before."""
        scheduler, pages = self.engine.scheduler, self.engine.pages
        assert not self.engine.has_work
        assert (scheduler.num_running, scheduler.num_waiting, pages.num_in_use) == (0, 0, 0)
        scheduler.check()
        if not self.engine.is_dead:
            answer = self.ask(self.canary.prompt, max_tokens=len(self.canary.token_ids), ignore_eos=True).outputs[0]
            assert (tuple(answer.token_ids), answer.text) == (self.canary.token_ids, self.canary.text), "the canary answers otherwise"
        self.engine.reset_prefix_cache()
        assert pages.num_free == pages.num_usable, "pages are not free after the cache was flushed"
        scheduler.check()
        self.check_conservation()

    def check_conservation(self) -> None:
        """Received = rejected + queued; queued = finished + in flight, each exactly once; and somebody was told of each end."""
        queued = [event.request_id for event in self.events.of(events.RequestQueued)]
        finished = [event.request_id for event in self.events.of(events.RequestFinished)]
        in_flight = self.engine.unfinished_ids
        assert len(self.events.of(events.RequestReceived)) == len(self.events.of(events.RequestRejected)) + len(queued)
        assert sorted(queued) == sorted(finished + in_flight)
        for event in self.events.of(events.RequestFinished):
            told = {str(answer.finish_reason) for output in self.outputs[event.request_id] for answer in output.outputs}
            assert event.reason == next(reason for reason in ("error", "abort", "length", "stop") if reason in told)
        assert sorted(self.last) == sorted(finished)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.last, f"{output.request_id} gave an output after its last one"
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.finished:
                self.last[output.request_id] = output
