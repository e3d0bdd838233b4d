"""What a client of a simulated server does with one request, and what it must see."""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestAbortedError
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.request_streams import RequestStreams
from tests.engine.virtual_loop import VirtualLoop


class Habit(enum.Enum):
    """How outputs are read."""

    PROMPT = "as they come"
    SLOW = "with rests in between"
    NEVER = "the first one, and then no more until everything is over"
    LEAVES = "some of them, and then the stream is closed"


@dataclass(eq=False)
class Client:
    """One request and its reader.

    Attributes:
        rests_s: how long a slow one rests after each output.
        group: clients that the queue's limits are asked for once.
        num_wanted: outputs after which one that leaves does so.
        is_cut: its task was cancelled, or its loop closed: whatever it has seen must be right, and there need be no end.
        must_be_aborted: an abort came while it was open and no step was being made.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    loop: VirtualLoop
    habit: Habit
    rests_s: list[float] = field(default_factory=list)
    num_wanted: int = 0
    group: QueueGroup | None = None
    is_cut: bool = False
    must_be_aborted: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)
    error: Exception | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def ids(self) -> list[int]:
        """Of the answer, as far as it was told."""
        told = [list(output.outputs[0].token_ids) for output in self.outputs]
        return sum(told, []) if self.params.output_kind is RequestOutputKind.DELTA else (told or [[]])[-1]

    @property
    def reason(self) -> FinishReason | None:
        """With which the request ended, as the client saw it."""
        return self.outputs[-1].outputs[0].finish_reason if self.outputs and self.outputs[-1].finished else None

    async def live(self, streams: RequestStreams, over: asyncio.Event) -> None:
        """Sends the request and reads."""
        stream = streams.outputs(self.prompt, self.params, self.request_id, self.priority, None, self.group)
        try:
            async for output in stream:
                self.outputs.append(output)
                if self.habit is Habit.SLOW and self.rests_s:
                    await asyncio.sleep(self.rests_s.pop())
                elif self.habit is Habit.NEVER and not output.finished:
                    await over.wait()
                elif self.habit is Habit.LEAVES and len(self.outputs) >= self.num_wanted:
                    await stream.aclose()  # type: ignore[attr-defined]
                    return
        except asyncio.CancelledError:
            # Left to the garbage collector, a stream that was not being read just now would end some time later.
            await stream.aclose()  # type: ignore[attr-defined]
            raise
        except (InvalidRequestError, QueueFullError, RequestAbortedError, EngineDeadError) as error:
            self.error = error

    def check(self, answer_of: Callable[[list[int], int], list[int]], text_of: Callable[[list[int]], str], *, is_dead: bool) -> None:
        """Each output follows from the ones before, all are of this request's answer, and the end is told once.

        Args:
            answer_of: the ids that the model gives after a prompt.
            text_of: their text.
            is_dead: whether the engine has died or was closed, so that any request may have been cut short.
        """
        assert all(output.request_id == self.request_id for output in self.outputs), f"{self} got another's output"
        assert not any(output.finished for output in self.outputs[:-1]), f"{self} got an output after its end"
        is_left = self.habit is Habit.LEAVES and len(self.outputs) >= self.num_wanted
        assert self.is_cut or is_left or (self.error is None) == (self.reason is not None), f"{self} was not told its end, or told twice"
        assert self.error is None or is_dead or not isinstance(self.error, EngineDeadError), f"{self} was told that the engine is dead"
        assert self.habit is not Habit.NEVER or len(self.outputs) <= 2, f"{self}: what was not read was not put together"
        max_tokens = self.params.max_tokens
        assert max_tokens is not None
        answer = answer_of(self.prompt, max_tokens)
        kind, ids, text = self.params.output_kind, self.ids, ""
        for output in self.outputs:
            (completion,) = output.outputs
            if kind is RequestOutputKind.DELTA:
                text += completion.text
            else:
                assert completion.text.startswith(text.rstrip("\ufffd")), f"{self} was told something and then something else"
                text = completion.text
        assert ids == answer[: len(ids)], f"{self} was told {ids} of {answer}"
        assert kind is not RequestOutputKind.FINAL_ONLY or len(self.outputs) <= 1
        if self.reason is FinishReason.LENGTH:
            assert ids == answer, f"{self} lacks ids"
            assert text == text_of(ids), f"{self} has another text"
        else:
            assert text_of(ids).startswith(text.rstrip("\ufffd")), f"{self} has another text"
            assert self.reason in (None, FinishReason.ABORT) or is_dead, f"{self} ended with {self.reason}"
        assert not self.must_be_aborted or is_dead or self.is_cut or self.error or self.reason in (None, FinishReason.ABORT), (
            f"{self} was aborted and went on"
        )
