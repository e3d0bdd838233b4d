"""A request inside the engine: its tokens so far, the pages that hold them, and how it ends."""

import enum

from jaxpaged.kv_groups import PageTables
from jaxpaged.prefix_index import PrefixChain
from jaxpaged.request import FinishReason, Request

NO_SLOT = -1


class SequenceStatus(enum.Enum):
    """Where a sequence is. Only a running one owns pages and a slot."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """One request's state, changed by the scheduler alone (`needs_host` and `first_unscored` by whoever knows).

    Steps are scheduled before the results of earlier ones are known, so there are two views of a sequence. The device's:
    `num_tokens` tokens, of which `num_computed_tokens` are computed once every scheduled step has run. The host's:
    `token_ids`, of which `num_confirmed_tokens` are computed by steps that have come back.

    Attributes:
        request: what was asked for.
        request_id: the request's.
        token_ids: prompt and answer as far as they are known; only ever grows.
        num_prompt_tokens: how many of them are the prompt.
        num_pending_ids: ids that scheduled steps sample and that are not known yet; they follow `token_ids`.
        num_computed_tokens: how many have their keys and values in the pages, or will have by the next step.
        num_confirmed_tokens: how many of them were computed by steps that `Scheduler.update` has taken in.
        tables: one page table per KV group.
        prefix: its place in the prefix cache.
        slot: its place in the device's state, 0 to max_num_seqs - 1; -1 without one.
        epoch: number of its last admission, counted over all sequences; 0 before the first.
        needs_host: it is not scheduled again before its last id is known (a grammar mask is made from it).
        first_unscored: the first token of the prompt whose log-probability is still to be told; `num_prompt_tokens` if there is none.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_hit_pages: pages found in the prefix cache at the last admission.
        num_preemptions: how often its pages were taken away.
        status: waiting, running, preempted (waiting again) or finished.
        finish_reason: why it ended.
        stop_reason: the stop string or stop token id that ended it; None for an end token.
        message: what to tell whoever asked, if it was ended for a reason of the engine (a time limit).
        error_code: the error's code then.
        max_total_tokens: tokens of prompt and answer at most; set by `Scheduler.add`.
        stop_ids: token ids that end it.
        num_pages_freed: pages given back by the last preemption or at the end.
        num_lost_tokens: computed tokens given up by the last preemption.
        num_once_computed: the most tokens that it ever had computed before a preemption.
        num_charged_tokens: computed tokens given up by a preemption that it has not come back from; 0 if an operator wished it.
        num_recomputed_tokens: those of them that were not found when it came back, and that nobody else had to spare (`admission`).
        has_recomputed_much: all pages that it can ever need are kept for it, since it may not be computed once more.
        queued_s: when it was added, by the scheduler's clock.
        queue_key: its place in the queue (see `waiting_queue`).
        last_token_s: monotonic time at which its last token was told; None before the first. Belongs to `engine_events`.
    """

    __slots__ = (
        "epoch",
        "error_code",
        "finish_reason",
        "first_unscored",
        "has_recomputed_much",
        "last_token_s",
        "max_total_tokens",
        "message",
        "needs_host",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_hit_pages",
        "num_lost_tokens",
        "num_once_computed",
        "num_pages_freed",
        "num_pending_ids",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "prefix",
        "priority",
        "queue_key",
        "queued_s",
        "request",
        "request_id",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "tables",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.priority = request.priority
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_pending_ids = 0
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.tables: PageTables = ([],)
        self.prefix = PrefixChain(request.cache_salt)
        self.slot = NO_SLOT
        self.epoch = 0
        self.needs_host = any(len(word) > 1 for word in request.bad_words_ids)
        self.first_unscored = self.num_prompt_tokens
        if params.prompt_logprobs is not None:
            self.first_unscored = min(request.score_from, self.num_prompt_tokens)
        self.num_cached_tokens = 0
        self.last_token_s: float | None = None
        self.num_hit_pages = 0
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.message: str | None = None
        self.error_code: str | None = None
        self.max_total_tokens = 0
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else request.eos_token_ids)
        self.num_pages_freed = 0
        self.num_lost_tokens = 0
        self.num_once_computed = 0
        self.num_charged_tokens = 0
        self.num_recomputed_tokens = 0
        self.has_recomputed_much = False
        self.queued_s = 0.0
        self.queue_key: tuple[float, int] = (0.0, 0)

    @property
    def pages(self) -> list[int]:
        """The page table of the first KV group, which is the only one of a uniform model."""
        return self.tables[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, those not known yet included."""
        return len(self.token_ids) + self.num_pending_ids

    @property
    def num_output_tokens(self) -> int:
        """Known tokens of the answer so far, an end token included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer as far as it is known, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no step has been scheduled for; 1 while decoding."""
        return len(self.token_ids) + self.num_pending_ids - self.num_computed_tokens

    @property
    def findable_token_ids(self) -> list[int]:
        """Tokens whose pages may come from the prefix cache: those before the first whose hidden state is looked at."""
        first = 1 if self.request.pooling == "mean" else self.first_unscored
        return self.token_ids if first == self.num_prompt_tokens else self.token_ids[:first]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> bool:
        """Takes the next token of the answer; whether it ends the answer. An end token is looked at before the length.

        An answer of no tokens is ended by its first one, which nobody sees.
        """
        if self.max_total_tokens == self.num_prompt_tokens + 1 and self.request.params.max_tokens == 0:
            self.finish_reason, self.status = FinishReason.LENGTH, SequenceStatus.FINISHED
            return True
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_output_tokens >= self.request.params.min_tokens:
            params = self.request.params
            self.finish_reason = FinishReason.STOP
            is_end_token = token_id in self.request.eos_token_ids and not params.ignore_eos
            self.stop_reason = None if is_end_token else token_id
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish_reason = FinishReason.LENGTH
        else:
            return False
        self.status = SequenceStatus.FINISHED
        return True

    def __repr__(self) -> str:
        known = f"{len(self.token_ids)}+{self.num_pending_ids}" if self.num_pending_ids else f"{len(self.token_ids)}"
        return f"Sequence({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{known} tokens, tables {self.tables})"
