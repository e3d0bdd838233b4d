"""Bugs of the queues between clients and engine, one patch each, and a world that notices each of them."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

from jaxpaged import mailbox, request_streams
from jaxpaged.engine_control import Pause
from jaxpaged.engine_driver import Arrival, EngineDriver, _on_loop
from jaxpaged.engine_turns import EngineTurns
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.interrupts import Interrupt
from jaxpaged.llm import LLM
from jaxpaged.mailbox import Mailbox
from jaxpaged.queue_group import HeldRequests, QueueGroup
from jaxpaged.request import Request, RequestOutput

type Plant = Callable[[pytest.MonkeyPatch], None]

real_add = EngineDriver.add
real_deliver = EngineDriver._deliver
real_leave = EngineTurns.leave
real_merge = mailbox.merge_deltas
real_put = Mailbox.put


def wake_up_before_the_wait_is_lost(patch: pytest.MonkeyPatch) -> None:
    async def get(self: Mailbox) -> RequestOutput:
        self._arrived.clear()
        await self._arrived.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        return output

    patch.setattr(Mailbox, "get", get)


def merged_outputs_wake_nobody(patch: pytest.MonkeyPatch) -> None:
    def put(self: Mailbox, output: RequestOutput) -> None:
        is_first = self._output is None
        real_put(self, output)
        if not is_first or output.finished:
            self._arrived.clear()

    patch.setattr(Mailbox, "put", put)


def delta_is_merged_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mailbox, "merge_deltas", lambda first, second: real_merge(real_merge(first, second), second))


def waiting_delta_is_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mailbox, "merge_deltas", lambda first, second: second)


def whole_outputs_are_merged_like_deltas(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_streams, "Mailbox", lambda loop, *, is_delta: Mailbox(loop, is_delta=True))


def error_overtakes_what_was_said(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Mailbox, error: JaxpagedError) -> None:
        self._output, self._error = None, error
        self._arrived.set()

    def die(self: EngineDriver, error: Exception) -> None:
        self._death = str(error)
        self._engine.die(error)
        self._engine.drain_failed()
        mailboxes, self.mailboxes = self.mailboxes, {}
        for box in mailboxes.values():
            _on_loop(box.loop, functools.partial(box.fail, EngineDeadError(self._death)))

    patch.setattr(Mailbox, "fail", fail)
    patch.setattr(EngineDriver, "_die", die)


def nobody_is_told_of_the_death(patch: pytest.MonkeyPatch) -> None:
    def die(self: EngineDriver, error: Exception) -> None:
        self._death = str(error)
        self._engine.die(error)
        self._engine.drain_failed()
        self.mailboxes = {}

    patch.setattr(EngineDriver, "_die", die)


def mailbox_stays_after_the_end(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: EngineDriver, outputs: Sequence[RequestOutput]) -> None:
        before = dict(self.mailboxes)
        real_deliver(self, outputs)
        self.mailboxes = before

    patch.setattr(EngineDriver, "_deliver", deliver)


def last_output_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: EngineDriver, outputs: Sequence[RequestOutput]) -> None:
        real_deliver(self, [output for output in outputs for _ in range(1 + output.finished)])

    def put(self: Mailbox, output: RequestOutput) -> None:
        real_put(self, output)
        if output.finished:
            real_put(self, output)

    patch.setattr(EngineDriver, "_deliver", deliver)
    patch.setattr(Mailbox, "put", put)


def one_loop_is_woken(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: EngineDriver, outputs: Sequence[RequestOutput]) -> None:
        loops = [box.loop for output in outputs if (box := self.mailboxes.get(output.request_id))]
        for output in outputs:
            box = self.mailboxes.get(output.request_id)
            if box is not None and output.finished:
                del self.mailboxes[output.request_id]
            if box is not None and box.loop is loops[0]:
                _on_loop(box.loop, functools.partial(box.put, output))

    patch.setattr(EngineDriver, "_deliver", deliver)


def arrival_is_forgotten_by_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "abort", lambda self, request_id: self._commands.put(lambda: self._abort(request_id)))


def abort_of_an_arrival_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def add(self: EngineDriver, request: Request, box: Mailbox, arrival: Arrival, group: QueueGroup | None = None) -> None:
        arrival.is_aborted = False
        real_add(self, request, box, arrival, group)

    patch.setattr(EngineDriver, "add", add)


def reader_that_leaves_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "forget", lambda self, request_id, box: None)


def namesake_is_aborted(patch: pytest.MonkeyPatch) -> None:
    """Whoever was refused for its id takes the first owner's request with it."""

    def add(self: EngineDriver, request: Request, box: Mailbox, arrival: Arrival, group: QueueGroup | None = None) -> None:
        if request.request_id in self.mailboxes:
            self._commands.put(lambda: self._abort(request.request_id))
        real_add(self, request, box, arrival, group)

    patch.setattr(EngineDriver, "add", add)


def namesake_gets_the_outputs(patch: pytest.MonkeyPatch) -> None:
    def add(self: EngineDriver, request: Request, box: Mailbox, arrival: Arrival, group: QueueGroup | None = None) -> None:
        if request.request_id in self.mailboxes:
            self.mailboxes[request.request_id] = box
            return
        real_add(self, request, box, arrival, group)

    patch.setattr(EngineDriver, "add", add)


def closed_loops_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "_abort_for_closed_loops", lambda self: None)


def time_limits_do_not_wake_the_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "patience_s", property(lambda self: 0.0 if self._death is None and self._engine.has_step else None))


def steps_wait_for_a_command(patch: pytest.MonkeyPatch) -> None:
    """The thread looks for work in the queue of commands alone."""
    patch.setattr(EngineDriver, "patience_s", property(lambda self: None))


def held_requests_are_never_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "_let_held_in", lambda self: None)


def held_requests_are_not_told_of_the_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldRequests, "take_all", lambda self: [])


def held_requests_cannot_be_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldRequests, "take_id", lambda self, request_id: [])


def room_for_held_requests_is_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineDriver, "_has_room_for", lambda self, request: True)


def mail_of_others_is_replaced(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: EngineTurns, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if (mail := self.mail.get(output.request_id)) is not None:
                mail[:] = [output]

    patch.setattr(EngineTurns, "deliver", deliver)


def outputs_are_put_twice(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: EngineTurns, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.mail.get(output.request_id, []).extend([output, output])

    patch.setattr(EngineTurns, "deliver", deliver)


def outputs_of_a_pause_are_lost(patch: pytest.MonkeyPatch) -> None:
    def pause(self: LLM, pause: Pause) -> None:
        control = self._engine.control
        with self._turns.change():
            control.begin_pause(pause)
            while not control.is_settled(pause):
                self._turns.step()
            control.finish_pause(pause)

    patch.setattr(LLM, "_pause", pause)


def who_leaves_in_a_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def leave(self: EngineTurns, request_id: str) -> None:
        if not self._lock.locked():
            real_leave(self, request_id)

    patch.setattr(EngineTurns, "leave", leave)


def who_leaves_in_a_step_waits_for_the_next_to_leave(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def turn(self: EngineTurns) -> Iterator[Interrupt]:
        with self._lock:
            yield Interrupt()

    patch.setattr(EngineTurns, "turn", turn)
    patch.setattr(EngineTurns, "step", lambda self: self.deliver(self._engine.step()))


def mail_stays_when_a_reader_leaves(patch: pytest.MonkeyPatch) -> None:
    def abort_those_left(self: EngineTurns) -> None:
        while self._left:
            self._engine.abort(self._left.popleft())

    patch.setattr(EngineTurns, "_abort_those_left", abort_those_left)


class PlantedBug(NamedTuple):
    """A bug and the seed of a world that notices it."""

    plant: Plant
    seed: int


FRONT_BUGS = [
    PlantedBug(plant, seed)
    for plant, seed in (
        (wake_up_before_the_wait_is_lost, 1),
        (merged_outputs_wake_nobody, 1),
        (delta_is_merged_twice, 0),
        (waiting_delta_is_replaced, 0),
        (whole_outputs_are_merged_like_deltas, 0),
        (error_overtakes_what_was_said, 5),
        (nobody_is_told_of_the_death, 0),
        (mailbox_stays_after_the_end, 0),
        (last_output_is_told_twice, 0),
        (one_loop_is_woken, 1),
        (arrival_is_forgotten_by_aborts, 3),
        (abort_of_an_arrival_is_forgotten, 3),
        (reader_that_leaves_is_not_noticed, 1),
        (namesake_is_aborted, 7),
        (namesake_gets_the_outputs, 1),
        (closed_loops_are_not_noticed, 16),
        (time_limits_do_not_wake_the_thread, 6),
        (steps_wait_for_a_command, 0),
        (held_requests_are_never_queued, 3),
        (held_requests_are_not_told_of_the_death, 29),
        (held_requests_cannot_be_aborted, 7),
        (room_for_held_requests_is_not_looked_for, 3),
    )
]

TURN_BUGS = [
    PlantedBug(plant, seed)
    for plant, seed in (
        (mail_of_others_is_replaced, 0),
        (outputs_are_put_twice, 0),
        (outputs_of_a_pause_are_lost, 2),
        (who_leaves_in_a_step_is_forgotten, 1),
        (who_leaves_in_a_step_waits_for_the_next_to_leave, 1),
        (mail_stays_when_a_reader_leaves, 0),
    )
]
"""Of `LLM`'s turns."""
