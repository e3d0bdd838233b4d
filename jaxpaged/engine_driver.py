"""What the engine thread of `AsyncLLM` does, turn by turn: commands first, then a step, until closed or dead.

Who owns what: the engine belongs to whoever calls `turn` and is reached by commands alone; a mailbox belongs to the task that
waits for one request, and is filled through the task's loop. Nothing here starts a thread or looks at a clock of its own, so
that a simulation can take the turns.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxpaged.engine_control import Pause
from jaxpaged.errors import EngineDeadError, JaxpagedError, QueueFullError, RequestAbortedError
from jaxpaged.mailbox import Mailbox
from jaxpaged.queue_group import HeldRequest, HeldRequests, QueueGroup
from jaxpaged.request import Request, RequestOutput

if TYPE_CHECKING:
    from jaxpaged.engine import Engine


class Arrival:
    """A request that is being tokenized, and whether it was aborted meanwhile; or a search, from its first step to its last.

    Attributes:
        request_id: what the user gave, checked or not.
        has_begun: some of its requests have been the engine's, so that a pause that ends all ends it as well.
    """

    def __init__(self, request_id: object) -> None:
        self.request_id, self.is_aborted, self.has_begun = request_id, False, False


class EngineDriver:
    """Drives an engine and delivers its outputs. Any thread may call the methods, and one alone `turn` and `end`.

    Args:
        engine: closed by `end`.

    Attributes:
        mailboxes: where the outputs of each open request go, by its id.
        held: requests that wait for room in the queue, and are not the engine's yet.
        is_closing: whether nothing is served any more.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.mailboxes: dict[str, Mailbox] = {}
        self.held = HeldRequests()
        self._arrivals: list[Arrival] = []
        self._order = threading.Lock()
        """An abort is either seen by the request that it is for, or comes after it."""
        self._death: str | None = None
        self.is_closing = False

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine no longer serves."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self.is_closing:
            raise EngineDeadError("the engine is closed")

    @contextlib.contextmanager
    def arriving(self, request_id: object) -> Iterator["Arrival"]:
        """While inside, a request is on its way to `add`, and an `abort` by its id is kept for it."""
        arrival = Arrival(request_id)
        with self._order:
            self._arrivals.append(arrival)
        try:
            yield arrival
        finally:
            with self._order:
                self._arrivals.remove(arrival)

    def add(
        self, request: Request, mailbox: Mailbox, arrival: Arrival, group: QueueGroup | None = None, search: Arrival | None = None
    ) -> None:
        """Queues a request; what the engine refuses it with goes into the mailbox. Raises EngineDeadError when closed.

        Args:
            group: those that it comes with. Once one of them was let in, the others wait for room in the queue.
            search: what it is a step of; one that was aborted between two steps ends with the next.
        """

        def command() -> None:
            is_aborted = arrival.is_aborted or (search is not None and search.is_aborted)
            is_later = group is not None and group.is_let_in and self._death is None
            is_held = is_later and (len(self.held) > 0 or not self._has_room_for(request))
            if group is not None and group.refusal is not None:
                _on_loop(mailbox.loop, functools.partial(mailbox.fail, group.refusal))
            elif is_aborted and is_held:
                _on_loop(mailbox.loop, functools.partial(mailbox.fail, _aborted()))
            elif is_held:
                self.held.put(HeldRequest(request, mailbox))
            else:
                is_queued = self._queue(request, mailbox, group)
                if is_queued and is_aborted:
                    self._abort(request.request_id)

        with self._order:
            self._commands.put(command)
        if self.is_closing:  # the thread may have passed its last look at the commands
            raise EngineDeadError("the engine is closed")

    def reject(self, request_id: str, error: JaxpagedError) -> None:
        """Notes a request that was turned away on its way to `add`."""
        self._commands.put(lambda: self._engine.reject(request_id, error))

    def abort(self, request_id: str) -> None:
        """Ends a request, on its way or here; nothing happens when it is neither."""
        with self._order:
            for arrival in self._arrivals:
                if arrival.request_id == request_id:
                    arrival.is_aborted = True
            self._commands.put(lambda: self._abort(request_id))

    def fail_open(self, error: JaxpagedError) -> None:
        """Ends every open request with an error, also when a turn hangs; the requests themselves end as their tasks leave."""
        for mailbox in (*self.mailboxes.copy().values(), *self.held.mailboxes):
            _on_loop(mailbox.loop, functools.partial(mailbox.fail, error))

    def forget(self, request_id: str, mailbox: Mailbox) -> None:
        """Aborts a request whose task has left, unless the id has come to belong to another one."""

        def command() -> None:
            if self.mailboxes.get(request_id) is mailbox:
                del self.mailboxes[request_id]
                self._engine.abort(request_id)
            else:
                self.held.take_mailbox(mailbox)

        self._commands.put(command)

    async def call[T](self, work: Callable[["Engine"], T]) -> T:
        """Has the thread do something with the engine, between two steps. Raises what it raises; EngineDeadError when closed."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(self._engine))
            except JaxpagedError as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(EngineDeadError(str(error)))
                raise

        self._commands.put(command)
        if self.is_closing:  # the thread may have passed its last look at the commands
            raise EngineDeadError("the engine is closed")
        return await asyncio.wrap_future(done)

    async def pause(self, pause: Pause) -> None:
        """See `EngineControl.pause` and `sleep`. A pause whose task is cancelled before it is finished has never been."""

        def begin(engine: "Engine") -> None:
            self._deliver(engine.control.begin_pause(pause))
            if pause.mode == "abort":
                self._abort_all_held()

        def is_settled(engine: "Engine") -> bool:
            engine.check_alive()
            return engine.control.is_settled(pause)

        try:
            await self.call(begin)
            # Each look waits for the step that is being made.
            while not await self.call(is_settled):
                pass
            await self.call(lambda engine: engine.control.finish_pause(pause))
        except BaseException:
            self._commands.put(lambda: self._engine.control.withdraw(pause))
            raise

    def begin_close(self) -> None:
        """Nothing is served any more: the turn that is being made is the last one, and `end` comes next."""
        self.is_closing = True
        self._commands.put(lambda: None)

    @property
    def has_commands(self) -> bool:
        """Whether a turn finds something to obey."""
        return not self._commands.empty()

    @property
    def patience_s(self) -> float | None:
        """Seconds that a turn waits for a command before it makes a step; None: for ever.

        Where nothing can be computed only somebody who waits has a time limit to reach.
        """
        engine = self._engine
        if self._death is not None:
            return None
        if engine.has_step:
            return 0.0
        if not engine.has_work or engine.next_deadline_s is None:
            return None
        return max(0.0, engine.next_deadline_s - engine.clocks.monotonic())

    def turn(self) -> None:
        """Obeys what was asked, and makes one step if there is one; waits for something to do."""
        self._let_held_in()
        self._obey(self.patience_s)
        if not self._is_serving():
            return
        self._let_held_in()
        try:
            self._abort_for_closed_loops()
            if self._engine.has_step:
                self._deliver(self._engine.step())
        except Exception as error:
            self._die(error)

    def end(self) -> None:
        """The last turn: aborts what is unfinished and closes the engine."""
        self._obey(0.0)
        for request_id in list(self.mailboxes):
            self._abort(request_id)
        self._fail_held(self.held.take_all(), _aborted())
        self._engine.close()
        self._obey(0.0)

    def _is_serving(self) -> bool:
        return not self.is_closing and self._death is None

    def _queue(self, request: Request, mailbox: Mailbox, group: QueueGroup | None) -> bool:
        """Hands a request to the engine; whether it was taken."""
        try:
            self._engine.add(request)
        except JaxpagedError as error:
            if group is not None and isinstance(error, QueueFullError):
                group.refusal = error
            _on_loop(mailbox.loop, functools.partial(mailbox.fail, error))
        except Exception as error:
            _on_loop(mailbox.loop, functools.partial(mailbox.fail, EngineDeadError(str(error))))
            raise
        else:
            self.mailboxes[request.request_id] = mailbox
            if group is not None:
                group.is_let_in = True
            return True
        return False

    def _has_room_for(self, request: Request) -> bool:
        """Whether the limits of the queue let it in."""
        try:
            self._engine.scheduler.check_queue(len(request.prompt_token_ids))
        except QueueFullError:
            return False
        return True

    def _let_held_in(self) -> None:
        """Those that wait before the queue go into it, in their order, as far as it has room."""
        try:
            while self._is_serving() and (held := self.held.first) is not None:
                if not self._has_room_for(held.request):
                    break
                self.held.take_first()
                self._queue(held.request, held.mailbox, None)
        except Exception as error:  # a bug of ours: nobody may wait for ever
            self._die(error)

    def _fail_held(self, taken: Sequence[HeldRequest], error: JaxpagedError) -> None:
        for held in taken:
            _on_loop(held.mailbox.loop, functools.partial(held.mailbox.fail, error))

    def _abort_all_held(self) -> None:
        """Those that wait before the queue, and searches that are between two steps."""
        self._fail_held(self.held.take_all(), _aborted())
        with self._order:
            for arrival in self._arrivals:
                arrival.is_aborted |= arrival.has_begun

    def _abort(self, request_id: str) -> None:
        self._fail_held(self.held.take_id(request_id), _aborted())
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _obey(self, patience_s: float | None) -> None:
        """Runs the commands that are there, and waits for the first of them."""
        try:
            self._commands.get(timeout=patience_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return
        except Exception as error:  # a bug of ours: nobody may wait for ever
            self._die(error)

    def _abort_for_closed_loops(self) -> None:
        """A loop that was closed without ending its tasks has nobody left who reads, nor anybody to say so."""
        self.held.take_closed()
        if any(loop.is_closed() for loop in {mailbox.loop for mailbox in self.mailboxes.values()}):
            for request_id, mailbox in list(self.mailboxes.items()):
                if mailbox.loop.is_closed():
                    del self.mailboxes[request_id]
                    self._engine.abort(request_id)

    def _die(self, error: Exception) -> None:
        self._death = self._death or str(error) or type(error).__name__
        self._engine.die(error)
        try:
            # A request that ended in the failing step keeps its end.
            self._deliver([output for output in self._engine.drain_failed() if output.error is None])
        except Exception as second:  # books that are wrong already; whoever waits is told all the same
            self._death = f"{self._death} (and then {type(second).__name__}: {second})"
        mailboxes, self.mailboxes = self.mailboxes, {}
        for mailbox in mailboxes.values():
            _on_loop(mailbox.loop, functools.partial(mailbox.fail, EngineDeadError(self._death)))
        self._fail_held(self.held.take_all(), EngineDeadError(self._death))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands outputs to their mailboxes, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for output in outputs:
            mailbox = self.mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finished:
                del self.mailboxes[output.request_id]
            by_loop.setdefault(mailbox.loop, []).append(functools.partial(mailbox.put, output))
        for loop, puts in by_loop.items():
            _on_loop(loop, functools.partial(_call_all, puts))


def _aborted() -> RequestAbortedError:
    return RequestAbortedError("The request was ended before it was queued")


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
