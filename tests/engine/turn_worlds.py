"""Random worlds around `LLM`: streams of one engine that take turns, each step serving them all, on one seed and in one thread.

Streams are generators, so any number of them are read in random order, and some are closed in the middle of another's step.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from jaxpaged.clocks import Clocks
from jaxpaged.config import Config
from jaxpaged.engine import Engine
from jaxpaged.engine_turns import EngineTurns
from jaxpaged.errors import EngineDeadError
from jaxpaged.intake import Intake
from jaxpaged.llm import LLM
from jaxpaged.request import FinishReason, RequestOutput, SamplingParams
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from tests.engine.front_device import TALK, VOCAB, FrontRunner
from tests.event_log import EventLog

NUM_EVENTS = 250


@dataclass(eq=False)
class Stream:
    """One request and what its reader has seen."""

    outputs: Iterator[RequestOutput]
    prompt: list[int]
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    request_id: str = ""
    reason: FinishReason | None = None
    is_over: bool = False


class TurnWorld:
    """A program with an `LLM` and many open streams."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        rng = self.rng = random.Random(seed)
        self.now = 0.0
        self.runner = FrontRunner(
            self, page_size=4, num_pages=rng.choice((13, 24, 60)), max_num_seqs=3, max_num_batched_tokens=16, max_model_len=48
        )
        self.engine = Engine(
            self.runner,
            tokenizer,
            max_in_flight=rng.choice((1, 2)),
            sink=EventLog(),
            clocks=Clocks(monotonic=lambda: self.now, wall=lambda: self.now),
        )
        intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset((2,)), vocab=VOCAB, seed=0)
        with mock.patch("jaxpaged.llm.start_engine", return_value=Started(self.engine, intake)):
            self.llm = LLM(config=Config(), sinks=[])
        self.llm._turns.wait_for_step = self.wait_for_step  # type: ignore[method-assign]
        self.llm._turns.step = self.step  # type: ignore[method-assign]
        self.streams: list[Stream] = []
        self.read: Stream | None = None
        self.closed: list[Stream] = []
        self.leave_chance = rng.choice((0.003, 0.03))
        self.runner.fails_at = rng.randint(10, 150) if rng.random() < 0.15 else None

    def live(self) -> list[tuple[object, ...]]:
        """Lets everything happen; returns what every stream said.

        Raises:
            AssertionError: something was lost, or said twice.
        """
        for _ in range(NUM_EVENTS):
            self.happen()
            self.check()
        if not self.engine.is_dead:
            self.llm.resume()
        # A reader that has not come for long finds all that was said meanwhile.
        for stream in self.rng.sample(self.open_streams(), len(self.open_streams())):
            while not stream.is_over:
                self.next_of(stream)
            self.check()
        assert self.llm._turns.mail == {}
        # A step whose requests have all left waits for the next call to be taken in.
        assert self.engine.num_unfinished == 0
        assert self.engine.pages.num_in_use == 0
        for stream in self.streams:
            answer = self.answer_of(stream.prompt, stream.max_tokens)
            assert stream.ids == answer[: len(stream.ids)], f"{stream} is not what the model says"
            assert stream.reason is not FinishReason.LENGTH or stream.ids == answer, f"{stream} lacks ids"
        self.llm.close()
        return [(stream.ids, stream.reason) for stream in self.streams]

    def happen(self) -> None:
        """One thing that a program may do."""
        rng = self.rng
        here = self.open_streams()
        match rng.choice(("new", "read", "read", "read", "read", "read", "leave", "generate", "operate")):
            case "new" if len(here) < 12 and not self.engine.is_dead and not self.engine.control.is_paused:
                self.open_stream()
            case "read" if here and not self.engine.control.is_paused:
                self.next_of(rng.choice(here))
            case "leave" if here and rng.random() < 10 * self.leave_chance:
                self.close_stream(rng.choice(here))
            case "generate" if not self.engine.is_dead and not self.engine.control.is_paused and rng.random() < 0.3:
                self.generate()
            case "operate" if not self.engine.is_dead:
                self.operate()

    def wait_for_step(self, num_changes: int) -> None:
        """Nobody reads in a pause, so there is nothing to wait for."""
        raise AssertionError("a reader waits for ever")

    def step(self) -> None:
        """One of `EngineTurns`."""
        assert self.engine.has_work, "a call waits for what nobody computes"
        EngineTurns.step(self.llm._turns)

    def open_stream(self) -> None:
        """A new one. It is queued when it is read for the first time."""
        prompt = [self.rng.randrange(3, 8) for _ in range(self.rng.randint(1, 14))]
        max_tokens = self.rng.randint(1, 20)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, stream_interval=self.rng.choice((1, 1, 3)))
        self.streams.append(Stream(self.llm.stream(prompt, params), prompt, max_tokens))

    def next_of(self, stream: Stream) -> None:
        """Reads one output."""
        self.read = stream
        try:
            output = next(stream.outputs)
        except (StopIteration, EngineDeadError) as error:
            assert stream.reason is not None or isinstance(error, EngineDeadError), f"{stream} has no end"
            stream.is_over = True
        else:
            assert stream.reason is None, f"{stream} says something after its end"
            assert stream.request_id in ("", output.request_id), f"{stream} said what is another's"
            stream.request_id = output.request_id
            stream.ids += output.outputs[0].token_ids
            stream.reason = output.outputs[0].finish_reason
        finally:
            self.read = None

    def close_stream(self, stream: Stream) -> None:
        """Its reader leaves."""
        stream.outputs.close()  # type: ignore[attr-defined]
        stream.is_over = True

    def meanwhile(self) -> None:
        """In the middle of a step: somebody else leaves."""
        others = [stream for stream in self.open_streams() if stream is not self.read and stream.ids]
        if others and self.rng.random() < self.leave_chance:
            self.close_stream(self.rng.choice(others))

    def generate(self) -> None:
        """A call of its own, beside the streams."""
        prompts = [[self.rng.randrange(3, 8) for _ in range(self.rng.randint(1, 14))] for _ in range(self.rng.randint(1, 4))]
        max_tokens = self.rng.randint(1, 12)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        try:
            outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        except EngineDeadError:
            assert self.engine.is_dead
            return
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == self.answer_of(prompt, max_tokens)

    def operate(self) -> None:
        """Pauses, resumes or resets."""
        try:
            match self.rng.choice(("pause", "resume", "resume", "resume", "reset")):
                case "pause":
                    self.llm.pause(self.rng.choice(("abort", "abort", "wait", "keep")), clear_cache=self.rng.random() < 0.5)  # type: ignore[arg-type]
                case "resume":
                    self.llm.resume()
                case "reset":
                    self.llm.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)
        except EngineDeadError:
            assert self.engine.is_dead

    def open_streams(self) -> list[Stream]:
        """Those that have a reader."""
        return [stream for stream in self.streams if not stream.is_over]

    def check(self) -> None:
        """Between two turns: every open request has its mail, and whoever has left is forgotten."""
        turns = self.llm._turns
        self.engine.scheduler.check()
        assert set(self.engine.unfinished_ids) <= set(turns.mail), "a request goes on whose reader is gone"
        assert not turns._left, "somebody who has left is not forgotten"
        gone = {stream.request_id for stream in self.streams if stream.is_over and stream.request_id}
        assert not gone & set(turns.mail), "mail is kept for nobody"

    def answer_of(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What the model says after a prompt, as far as context and pool reach; the last token is not stored."""
        most = min(self.runner.limits.max_model_len, self.engine.pages.num_usable * self.runner.page_size + 1)
        ids = list(prompt)
        while len(ids) < min(most, len(prompt) + max_tokens):
            ids.append(TALK(tuple(ids)))
        return ids[len(prompt) :]


def simulate_turns(seed: int, tokenizer: Tokenizer) -> list[tuple[object, ...]]:
    """One random world, from beginning to end.

    Raises:
        AssertionError: something was lost, or said twice.
    """
    return TurnWorld(seed, tokenizer).live()
