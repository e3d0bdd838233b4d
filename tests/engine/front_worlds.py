"""Random worlds around a whole engine: tasks, mailboxes, the commands of the engine thread, detokenizer, scheduler and pages.

Everything happens in one thread, on one virtual clock and from one seed: the turns of the engine thread, of two event loops and
of the tokenizers' pool are taken in random order, and some of them in the middle of a step, while the device is busy. The model
is a function of each row's history, which the device reads back through the row's page table.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_control import Pause
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.intake import Intake
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import FinishReason, RequestOutputKind, SamplingParams
from jaxpaged.request_streams import RequestStreams
from jaxpaged.tokenizer import Tokenizer
from tests.engine.front_clients import Client, Habit
from tests.engine.front_device import TALK, VOCAB, FrontRunner, NotedDriver
from tests.engine.virtual_loop import VirtualLoop, VirtualPool
from tests.event_log import EventLog

MAX_TURNS = 20_000


class FrontWorld:
    """A server and the clients that trouble it."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        rng = self.rng = random.Random(seed)
        self.group_rng = random.Random(~seed)
        self.groups: list[QueueGroup] = []
        self.now = 0.0
        self.tokenizer = tokenizer
        self.log = EventLog()
        runner = self.runner = FrontRunner(
            self,
            page_size=rng.choice((2, 4)),
            num_pages=rng.choice((13, 24, 60)),
            max_num_seqs=rng.choice((1, 3, 6)),
            max_num_batched_tokens=rng.choice((8, 16)),
            max_model_len=60,
        )
        self.engine = Engine(
            runner,
            tokenizer,
            max_in_flight=rng.choice((1, 2, 2)),
            policy=SchedulerConfig(
                max_num_queued_requests=rng.choice((None, None, 8)),
                queue_timeout_s=rng.choice((None, 1.0)),
                request_timeout_s=rng.choice((None, None, 3.0)),
            ),
            sink=self.log,
            clocks=Clocks(monotonic=lambda: self.now, wall=lambda: self.now),
        )
        self.driver = NotedDriver(self.engine)
        self.pool = VirtualPool()
        intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset((2,)), vocab=VOCAB, seed=0)
        self.streams = RequestStreams(self.driver, intake, self.pool, lambda: self.now)
        self.loops = [VirtualLoop(lambda: self.now) for _ in range(2)]
        self.over = {loop: asyncio.Event() for loop in self.loops}
        self.clients: list[Client] = []
        self.aborted: set[str] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        self.num_to_come = rng.choice((15, 30, 60))
        self.families = [[rng.randrange(3, 13) for _ in range(40)] for _ in range(3)]
        self.flood_chance = rng.choice((0.0, 0.02))
        self.operator_chance = rng.choice((0.0, 0.01))
        self.abort_chance = rng.choice((0.0, 0.005, 0.03))
        self.leap_chance = rng.choice((0.0, 0.0, 0.005))
        self.closes_loop_at = rng.randint(20, 300) if rng.random() < 0.2 else None
        self.closes_at = rng.randint(50, 400) if rng.random() < 0.15 else None
        runner.fails_at = rng.randint(5, 100) if rng.random() < 0.15 else None
        self.is_in_turn = False
        limits = self.engine.scheduler._limits._policy
        self.may_end_any = limits.queue_timeout_s is not None or limits.request_timeout_s is not None
        self.trace: list[tuple[object, ...]] = []

    def live(self) -> list[tuple[object, ...]]:
        """Lets everything happen; returns all that every client saw, and when.

        Raises:
            AssertionError: something was lost, or told wrongly.
        """
        for number in range(MAX_TURNS):
            self.happen(number)
            actors = self.actors()
            if actors:
                self.rng.choice(actors)()
            elif not self.wait():
                if not self.num_to_come:
                    break
                self.arrive()
        else:
            raise AssertionError(f"requests are left over: {self.engine.unfinished_ids}")
        self.finish()
        return self.trace

    def answer_of(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What the model says after a prompt, as far as context and pool reach; the last token is not stored."""
        most = min(self.runner.limits.max_model_len, self.engine.pages.num_usable * self.runner.page_size + 1)
        ids = list(prompt)
        while len(ids) < min(most, len(prompt) + max_tokens):
            ids.append(TALK(tuple(ids)))
        return ids[len(prompt) :]

    def actors(self) -> list[Callable[[], None]]:
        """Who has something to do now."""
        actors = [loop.turn for loop in self.loops if not loop.is_closed() and loop.next_s is not None and loop.next_s <= self.now]
        if len(self.pool):
            actors.append(lambda: self.pool.work(self.rng))
        if not self.driver.is_closing and (self.driver.has_commands or self.driver.patience_s == 0.0):
            actors += [self.take_turn, self.take_turn]
        return actors

    def take_turn(self) -> None:
        """The engine thread's."""
        gone, limits = self.ids_of_gone_clients(), self.engine.scheduler._limits._policy
        self.is_in_turn = True
        self.driver.turn()
        self.is_in_turn = False
        self.engine.scheduler.check()
        self.check_held()
        most = limits.max_num_queued_requests
        assert most is None or all(event.num_waiting <= most for event in self.log.of(events.RequestQueued)), "the queue is too long"
        # Who has left since may have done so during the step.
        still_gone = gone & self.ids_of_gone_clients()
        assert not still_gone & set(self.driver.mailboxes), "a request whose reader is gone goes on"
        if not self.engine.is_dead:
            assert set(self.driver.mailboxes) == set(self.engine.unfinished_ids), "an output has no mailbox, or a mailbox no request"

    def check_held(self) -> None:
        """Who waits before the queue came with somebody who was let in, and waits because there is no room."""
        for held in self.driver.held:
            groups = [client.group for client in self.clients if client.request_id == held.request.request_id]
            assert any(group is not None and group.is_let_in for group in groups)
        first = self.driver.held.first
        if first is not None and not self.is_over and not self.engine.scheduler.is_paused:
            # A step may have made room since the turn looked.
            assert self.engine.has_work or self.driver.patience_s == 0.0, "nothing will ever let it in"

    def ids_of_gone_clients(self) -> set[str]:
        """Requests that nobody will read any more."""
        gone, here = set[str](), set[str]()
        for client in self.clients:
            assert client.task is not None
            (gone if client.task.done() or client.loop.is_closed() else here).add(client.request_id)
        return gone - here

    def wait(self) -> bool:
        """Nobody has anything to do: to the next moment at which somebody has, if there is one."""
        times = [loop.next_s for loop in self.loops if not loop.is_closed()]
        if not self.driver.is_closing and (patience_s := self.driver.patience_s) is not None:
            times.append(self.now + patience_s)
        known = [time_s for time_s in times if time_s is not None]
        if not known:
            return False
        self.now = max(self.now, min(known))
        deadline_s = self.engine.next_deadline_s
        if self.engine.has_work and deadline_s is not None and not self.is_over:
            assert self.now <= deadline_s, "the engine thread sleeps through a time limit"
        return True

    def meanwhile(self) -> None:
        """In the middle of a step: the others go on."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            others = [loop.turn for loop in self.loops if not loop.is_closed() and loop.next_s is not None and loop.next_s <= self.now]
            if len(self.pool):
                others.append(lambda: self.pool.work(self.rng))
            if others:
                self.rng.choice(others)()
            self.disturb()

    def happen(self, number: int) -> None:
        """What comes at its time."""
        rng = self.rng
        if self.num_to_come and rng.random() < 0.15:
            self.arrive()
        if rng.random() < self.flood_chance:
            group = QueueGroup()
            self.groups.append(group)
            for _ in range(min(20, self.num_to_come)):
                self.arrive(group)
        if rng.random() < self.leap_chance:
            self.now += rng.choice((0.5, 30.0))
        if number == self.closes_loop_at:
            self.close_loop()
        if number == self.closes_at:
            self.close()
        self.disturb()

    def disturb(self) -> None:
        """What may happen at any moment."""
        rng = self.rng
        open_clients = [client for client in self.clients if client.task is not None and not client.task.done()]
        if open_clients and rng.random() < self.abort_chance:
            self.abort(rng.choice(open_clients))
        if open_clients and rng.random() < self.abort_chance / 2:
            client = rng.choice(open_clients)
            if not client.loop.is_closed():
                assert client.task is not None
                client.is_cut = True
                client.loop.call_soon_threadsafe(client.task.cancel)
        if rng.random() < self.operator_chance:
            self.operate()

    def abort(self, client: Client) -> None:
        """By id, from any thread. Until the engine has told the end, and outside of a step, it must come in time."""
        self.driver.abort(client.request_id)
        self.aborted.add(client.request_id)
        has_ended = any(event.request_id == client.request_id for event in self.log.of(events.RequestFinished))
        is_here = any(arrival.request_id == client.request_id for arrival in self.driver._arrivals)
        is_held = any(held.request.request_id == client.request_id for held in self.driver.held)
        is_known = is_here or is_held or client.request_id in self.driver.mailboxes
        if is_known and self.is_alone(client) and not has_ended and not self.is_in_turn:
            client.must_be_aborted = True

    def operate(self) -> None:
        """An operator's call, which may be given up."""
        rng, driver = self.rng, self.driver
        loop = self.loops[0]
        match rng.choice(("pause", "resume", "resume", "reset")):
            case "pause":
                mode = rng.choice(("abort", "wait", "keep", "keep"))
                self.may_end_any |= mode == "abort"
                task = self.start(loop, self.quietly(driver.pause(Pause(mode, clear_cache=rng.random() < 0.5))))  # type: ignore[arg-type]
                if rng.random() < 0.3:
                    loop.call_later(rng.random() * 0.05, task.cancel)
                # Somebody always resumes.
                loop.call_later(rng.random(), lambda: self.start(loop, self.quietly(driver.call(lambda engine: engine.control.resume()))))
            case "resume":
                self.start(loop, self.quietly(driver.call(lambda engine: engine.control.resume())))
            case "reset":
                is_all = rng.random() < 0.5
                self.start(
                    loop,
                    self.quietly(driver.call(lambda engine: engine.control.reset_prefix_cache(reset_running_requests=is_all))),
                )

    def arrive(self, group: QueueGroup | None = None) -> None:
        """A client comes, on any loop, alone or with a group."""
        if group is None and self.groups and self.group_rng.random() < 0.3:
            group = self.group_rng.choice(self.groups)
        rng = self.rng
        self.num_to_come -= 1
        open_loops = [loop for loop in self.loops if not loop.is_closed()]
        loop, family, length = rng.choice(open_loops), rng.choice(self.families), rng.randint(1, 20)
        num_shared = rng.randint(0, length)
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=rng.randint(1, 25),
            output_kind=rng.choice(kinds),
            stream_interval=rng.choice((1, 1, 3)),
        )
        request_id = f"r{len(self.clients)}"
        if self.clients and rng.random() < 0.05:
            request_id = rng.choice(self.clients).request_id
        habit = rng.choice((*[Habit.PROMPT] * 4, *[Habit.SLOW] * 3, Habit.NEVER, Habit.LEAVES))
        prompt = family[:num_shared] + [rng.randrange(3, 13) for _ in range(length - num_shared)]
        if rng.random() < 0.03:
            prompt = rng.choice(([], [VOCAB], [5] * 70))
        client = Client(request_id, prompt, params, rng.choice((0, 0, 1)), loop, habit)
        client.rests_s = [rng.choice((0.001, 0.03, 0.5)) for _ in range(8)]
        client.num_wanted = rng.randint(1, 4)
        client.group = group
        self.clients.append(client)
        client.task = self.start(loop, client.live(self.streams, self.over[loop]))

    def start(self, loop: VirtualLoop, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task; kept, so that it is not collected while it runs."""
        task = loop.create_task(work)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.tasks.append(task)
        return task

    async def quietly(self, call: Coroutine[Any, Any, Any]) -> None:
        """An operator's call; an engine that is dead says so."""
        try:
            await call
        except JaxpagedError as error:
            assert self.is_over, error

    @property
    def is_over(self) -> bool:
        """Whether the engine serves no more."""
        return self.engine.is_dead or self.driver.is_closing

    def close_loop(self) -> None:
        """A program's loop is closed, and its tasks are not ended."""
        loop = self.loops[1]
        for client in self.clients:
            client.is_cut |= client.loop is loop
        loop.close()

    def close(self) -> None:
        """The server is shut down in the middle of everything."""
        self.num_to_come = 0
        self.driver.begin_close()
        self.driver.end()

    def finish(self) -> None:
        """Nothing happens any more: everybody has got what was due, and nothing is left."""
        for loop in self.loops:
            for client in self.clients:
                if client.loop is loop and not loop.is_closed() and client.habit is not Habit.NEVER:
                    assert client.task is not None
                    assert client.task.done(), f"{client} waits for ever"
        for loop, over in self.over.items():
            if not loop.is_closed():
                over.set()
        while actors := self.actors():
            actors[0]()
        for client in self.clients:
            if not client.loop.is_closed():
                assert client.task is not None
                assert client.task.done(), f"{client} waits for ever"
                if not client.task.cancelled():
                    assert client.task.exception() is None, client.task.exception()
            client.check(self.answer_of, self.tokenizer.decode, is_dead=self.is_over)
            if client.reason is FinishReason.ABORT and not self.may_end_any and not self.is_over:
                assert client.request_id in self.aborted, f"{client} was aborted by nobody"
            if self.is_alone(client):
                self.check_told(client)
            self.trace.append((client.request_id, client.habit, client.reason, repr(client.error), client.outputs))
        for loop in self.loops:
            assert not loop.errors, loop.errors
        # Tasks of a closed loop are kept here, and stay where they were.
        ids_of_closed = {client.request_id for client in self.clients if client.loop.is_closed()}
        assert all(arrival.request_id in ids_of_closed for arrival in self.driver._arrivals)
        assert self.driver.mailboxes == {}
        assert not len(self.driver.held)
        assert not [group for group in self.groups if group.is_let_in and group.refusal], "a group was let in, and then refused"
        assert not self.engine.has_work
        assert self.engine.pages.num_in_use == 0
        self.engine.scheduler.check()
        queued = sorted(event.request_id for event in self.log.of(events.RequestQueued))
        assert queued == sorted(event.request_id for event in self.log.of(events.RequestFinished)), "a request has no end, or two"
        assert len(self.log.of(events.RequestReceived)) == len(self.log.of(events.RequestRejected)) + len(queued)

    def check_told(self, client: Client) -> None:
        """What the engine gave for this client has reached it."""
        if isinstance(client.error, EngineDeadError):
            assert self.ends_of(client.request_id) != ["length"], f"{client} was told that the engine died, and had ended before"
        if not client.is_cut and client.habit is not Habit.LEAVES:
            assert client.ids == self.driver.handed.get(client.request_id, []), f"{client} has not got all that was said"

    def is_alone(self, client: Client) -> bool:
        """Whether nobody else came with the same id."""
        return sum(other.request_id == client.request_id for other in self.clients) == 1

    def ends_of(self, request_id: str) -> list[str]:
        """How the requests of that id ended, as the engine says."""
        return [event.reason for event in self.log.of(events.RequestFinished) if event.request_id == request_id]

    def shut(self) -> None:
        """Closes what is still open."""
        if not self.driver.is_closing:
            self.close()
        for loop in self.loops:
            if not loop.is_closed():
                loop.close()
        for task in self.tasks:
            if not task.done() and (coroutine := task.get_coro()) is not None:
                coroutine.close()


def simulate_front(seed: int, tokenizer: Tokenizer) -> list[tuple[object, ...]]:
    """One random world, from beginning to end.

    Raises:
        AssertionError: something was lost, or told wrongly.
    """
    world = FrontWorld(seed, tokenizer)
    try:
        return world.live()
    finally:
        world.shut()
