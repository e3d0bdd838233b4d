"""The door: which requests are turned away at once, how long an answer can become, and who has waited or run too long."""

import enum
import heapq

from jaxpaged.config import SchedulerConfig
from jaxpaged.counts import counted
from jaxpaged.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    JaxpagedError,
    PoolTooSmallError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
)
from jaxpaged.page_manager import PageManager
from jaxpaged.sequence import Sequence, SequenceStatus


def reserve_pages_of(policy: SchedulerConfig, num_usable: int) -> int:
    """Pages that stay free for requests of a higher priority than the default, in a pool of `num_usable` pages.

    Raises:
        ConfigError: they leave no page for anybody else.
    """
    reserve_pages = num_usable // 100 if policy.reserve_pages is None else policy.reserve_pages
    if reserve_pages >= num_usable:
        raise ConfigError(
            f"reserve_pages {reserve_pages} leaves nothing of a page pool of {counted(num_usable, 'page')}: "
            "lower it or give the pool more memory "
            "(--cache.memory)",
            param="scheduler.reserve_pages",
        )
    return reserve_pages


class AdmissionLimits:
    """Limits that do not change while the engine runs.

    Args:
        page_manager: the pool.
        policy: limits on the queue, and the reserve.
        max_model_len: tokens of prompt and answer at most.

    Attributes:
        most_prompt_tokens: of the longest prompt that `check_fits` lets through.

    Raises:
        ConfigError: the reserve leaves no page for anybody else.
    """

    def __init__(self, page_manager: PageManager, policy: SchedulerConfig, max_model_len: int) -> None:
        self._pages = page_manager
        self._policy = policy
        self.max_model_len = max_model_len
        num_usable = page_manager.num_usable
        self.reserve_pages = reserve_pages_of(policy, num_usable)
        most_tokens = page_manager.arithmetic.most_tokens(num_usable, max_model_len)
        # The last token of an answer is never computed, so it needs no place in the pool.
        self._most_total_tokens = min(max_model_len, most_tokens + 1)
        self.most_prompt_tokens = most_tokens - 1

    def check_fits(self, num_prompt: int) -> None:
        """Checks that a prompt of `num_prompt` tokens can ever run.

        Raises:
            InvalidRequestError: the prompt is empty.
            ContextLengthError: the prompt leaves no room for an answer in the context.
            PoolTooSmallError: the prompt and one token can never fit in the page pool.
        """
        pool, num_usable = self._pages, self._pages.num_usable
        if num_prompt == 0:
            raise InvalidRequestError("The prompt is empty: give at least one token", param="prompt")
        if num_prompt >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {counted(num_prompt, 'token')} and the context {self.max_model_len}, which leaves no room for an answer: "
                f"shorten the prompt to at most {counted(self.max_model_len - 1, 'token')}",
                param="prompt",
            )
        if (num_pages := pool.arithmetic.peak_pages(num_prompt + 1)) > num_usable:
            most = pool.arithmetic.most_tokens(num_usable, num_prompt) - 1
            raise PoolTooSmallError(
                f"The prompt has {counted(num_prompt, 'token')} and needs {counted(num_pages, 'page')} with the first token of the answer, "
                f"and the page pool has {counted(num_usable, 'page')} of {counted(pool.page_size, 'token')}: shorten the prompt to at most "
                f"{counted(most, 'token')} or give the pool more memory (--cache.memory)",
                param="prompt",
            )

    def check_queue(self, num_prompt: int, num_waiting: int, num_waiting_tokens: int) -> None:
        """Checks that one request more may wait. An empty queue takes any request.

        Raises:
            QueueFullError: too many requests or prompt tokens wait already.
        """
        most_requests, most_tokens = self._policy.max_num_queued_requests, self._policy.max_num_queued_tokens
        if most_requests is not None and num_waiting >= most_requests:
            raise QueueFullError(
                f"{counted(num_waiting, 'request')} {_are(num_waiting)} waiting, and max_num_queued_requests is {most_requests}: "
                "try again later"
            )
        if most_tokens is not None and num_waiting and num_waiting_tokens + num_prompt > most_tokens:
            raise QueueFullError(
                f"{counted(num_waiting_tokens, 'prompt token')} {_are(num_waiting_tokens)} waiting, and with the {num_prompt} of this "
                f"request they would be more than max_num_queued_tokens {most_tokens}: try again later"
            )

    def max_total_tokens(self, sequence: Sequence) -> int:
        """Tokens of prompt and answer at most: what was asked for, the context, and a pool that it would fill alone."""
        max_tokens = sequence.request.params.max_tokens
        if max_tokens is None:
            return self._most_total_tokens
        return min(self._most_total_tokens, sequence.num_prompt_tokens + max(1, max_tokens))


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


class _Limit(enum.Enum):
    QUEUE = "queue"
    REQUEST = "request"


class Deadlines:
    """Time limits of requests, the next one first."""

    def __init__(self, policy: SchedulerConfig) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, Sequence, _Limit]] = []
        self._num_added = 0
        self._compact_at = 64

    def add(self, sequence: Sequence, *, has_queue_limit: bool = True) -> None:
        """Starts the limits of a sequence that was queued just now; `has_queue_limit`: the one on its time in the queue as well."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 64
        queue_s, request_s = self._policy.queue_timeout_s, self._policy.request_timeout_s
        if queue_s is not None and has_queue_limit:
            self._push(sequence, queue_s, _Limit.QUEUE)
        if request_s is not None:
            self._push(sequence, request_s, _Limit.REQUEST)

    def expired(self, now_s: float) -> list[tuple[Sequence, JaxpagedError]]:
        """Sequences whose time is over, each once, with what to say of it."""
        found: dict[Sequence, JaxpagedError] = {}
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].is_finished):
            _, _, sequence, limit = heapq.heappop(self._heap)
            if sequence.is_finished or (limit is _Limit.QUEUE and sequence.status is not SequenceStatus.WAITING):
                continue
            found.setdefault(sequence, self._error(limit))
        return list(found.items())

    @property
    def next_s(self) -> float | None:
        """When the next limit may be reached."""
        return self._heap[0][0] if self._heap else None

    def _error(self, limit: _Limit) -> JaxpagedError:
        if limit is _Limit.QUEUE:
            return QueueTimeoutError(f"The request waited {self._policy.queue_timeout_s:g} s and was not started (queue_timeout_s)")
        return RequestTimeoutError(f"The request took longer than {self._policy.request_timeout_s:g} s (request_timeout_s)")

    def _push(self, sequence: Sequence, seconds: float, limit: _Limit) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (sequence.queued_s + seconds, self._num_added, sequence, limit))
