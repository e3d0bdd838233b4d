"""A request inside the engine: its tokens so far, the pages that hold them, and how it ends."""

import enum

from jaxpaged.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    """Where a sequence is. Only a running one owns pages."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """One request's state, changed by the scheduler alone.

    Attributes:
        request: what was asked for.
        request_id: the request's.
        token_ids: prompt and answer so far; only ever grows.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many have their keys and values in `pages`.
        pages: page table, in order.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_preemptions: how often its pages were taken away.
        status: waiting, running, preempted (waiting again) or finished.
        finish_reason: why it ended.
        stop_reason: the stop string or stop token id that ended it; None for an end token.
        max_total_tokens: tokens of prompt and answer at most; set by `Scheduler.add`.
        stop_ids: token ids that end it.
        page_digests: digests of its first pages, as far as they were needed (the page manager's memo).
        num_pages_freed: pages given back by the last preemption or at the end.
        num_lost_tokens: computed tokens given up by the last preemption.
    """

    __slots__ = (
        "finish_reason",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pages_freed",
        "num_preemptions",
        "num_prompt_tokens",
        "page_digests",
        "pages",
        "request",
        "request_id",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.pages: list[int] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.max_total_tokens = 0
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else request.eos_token_ids)
        self.page_digests: list[bytes] = []
        self.num_pages_freed = 0
        self.num_lost_tokens = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, an end token included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> bool:
        """Takes the next token of the answer; whether it ends the answer. An end token is looked at before the length."""
        self.token_ids.append(token_id)
        params = self.request.params
        if token_id in self.stop_ids and self.num_output_tokens >= params.min_tokens:
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
        tokens = f"{self.num_computed_tokens}/{len(self.token_ids)} tokens"
        return f"Sequence({self.request_id!r}, {self.status.value}, {tokens}, pages {self.pages})"
