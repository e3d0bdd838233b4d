"""Outputs of one request on their way from the engine thread to the task that waits for them."""

import asyncio

import msgspec

from jaxpaged.errors import JaxpagedError
from jaxpaged.request import CompletionOutput, RequestOutput


class Arrival:
    """An `asyncio.Event` for one task that waits: a stream waits once for each of its tokens, and that one is half as quick."""

    __slots__ = ("_loop", "_waiter", "is_set")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wakes the task."""
        self.is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """The next `wait` waits."""
        self.is_set = False

    async def wait(self) -> None:
        """Returns once it is set."""
        if not self.is_set:
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None


class Mailbox:
    """Belongs to the task, which reads; written to on the task's loop. What is not read yet is merged, so it stays small.

    Args:
        loop: the task's.
        is_delta: outputs hold what is new, so that two of them are put together; otherwise the later one is taken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_delta: bool) -> None:
        self.loop = loop
        self._is_delta = is_delta
        self._arrived = Arrival(loop)
        self._output: RequestOutput | None = None
        self._error: JaxpagedError | None = None

    def put(self, output: RequestOutput) -> None:
        """Called on the loop."""
        waiting = self._output
        self._output = merge_deltas(waiting, output) if self._is_delta and waiting is not None else output
        self._arrived.set()

    def fail(self, error: JaxpagedError) -> None:
        """Called on the loop."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Waits for what is new. Raises what the request failed with."""
        if not self._arrived.is_set:
            await self._arrived.wait()
        self._arrived.clear()
        output, self._output = self._output, None
        if output is not None:
            if self._error is not None:
                self._arrived.set()
            return output
        assert self._error is not None
        raise self._error


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request, one after the other, as one: each sample's text and ids are put together."""
    completions: dict[int, CompletionOutput] = {completion.index: completion for completion in first.outputs}
    for after in second.outputs:
        before = completions.get(after.index)
        if before is not None:
            logprobs = None if before.logprobs is None or after.logprobs is None else before.logprobs + after.logprobs
            after = msgspec.structs.replace(
                after, text=before.text + after.text, token_ids=before.token_ids + after.token_ids, logprobs=logprobs
            )
        completions[after.index] = after
    return msgspec.structs.replace(
        second,
        outputs=[completions[index] for index in sorted(completions)],
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
    )
