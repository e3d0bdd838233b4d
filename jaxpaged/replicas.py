"""Several engines behind one door (`data` of a mesh): each has devices, scheduler, pages and prefix cache of its own.

A request goes where the longest beginning of it is cached; among equals, where fewest pages are in use or will be taken by requests that
wait. `Replicas` is an engine to whoever drives it: one call of `step` has each of them take a step, and as steps run behind the call,
their devices work at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.engine import Engine
from jaxpaged.engine_control import EngineControl
from jaxpaged.engine_events import EngineEvents
from jaxpaged.errors import EngineDeadError, QueueFullError
from jaxpaged.page_manager import PageManager
from jaxpaged.pool_map import PoolCopy, join_pools
from jaxpaged.prefix_index import PrefixChain
from jaxpaged.request import Request, RequestOutput
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence as ModelSequence


class LoadSums:
    """What engines say of their loads becomes what all of them have, with their own beside it; their ends are told by `Replicas`.

    Args:
        sink: takes every event.
    """

    def __init__(self, sink: events.Sink) -> None:
        self._sink = sink
        self.engines: Sequence[Engine] = ()

    def sink_of(self, engine: int) -> "OwnSink":
        """The sink of the engine of that number."""
        return OwnSink(self, engine)

    def take(self, engine: int, event: events.Event) -> None:
        """Takes one event of one engine."""
        match event:
            case events.HealthChanged() | events.EngineStopped():
                return
            case events.RequestFirstToken() | events.RequestFinished():
                event = msgspec.structs.replace(event, engine=engine)
            case events.StepFinished() | events.LoadChanged():
                loads = [_load_of(one) for one in self.engines]
                sums = {name: sum(getattr(load, name) for load in loads) for name in events.EngineLoad.__struct_fields__}
                event = msgspec.structs.replace(event, engine=engine, own_load=loads[engine], **sums)
            case events.RequestQueued():
                num_waiting = sum(one.scheduler.num_waiting for one in self.engines)
                event = msgspec.structs.replace(event, num_waiting=num_waiting, engine=engine, own_load=_load_of(self.engines[engine]))
        self._sink(event)


class OwnSink:
    """The sink of one engine of several.

    Args:
        sums: see `LoadSums`.
        engine: its number.
    """

    def __init__(self, sums: LoadSums, engine: int) -> None:
        self._sums, self._engine = sums, engine

    def __call__(self, event: events.Event, /) -> None:
        """Takes one event."""
        self._sums.take(self._engine, event)

    def close(self) -> None:
        """Whoever made the real one closes it."""


def _load_of(engine: Engine) -> events.EngineLoad:
    scheduler, pages = engine.scheduler, engine.pages
    return events.EngineLoad(scheduler.num_running, scheduler.num_waiting, pages.num_usable, pages.num_in_use, pages.num_cached_idle)


class _AllEvents(EngineEvents):
    """What all of them together have to say; of its load each speaks for itself."""

    def __init__(self, engines: Sequence[Engine], sums: LoadSums, sink: events.Sink, clocks: Clocks) -> None:
        super().__init__(sink, clocks)
        self._own = [(engine, EngineEvents(sums.sink_of(number), clocks)) for number, engine in enumerate(engines)]

    def load_changed(self, scheduler: Scheduler, pages: PageManager) -> None:
        for engine, emit in self._own:
            emit.load_changed(engine.scheduler, engine.pages)


class Replicas(Engine):
    """See the module. One thread at a time may call it.

    Args:
        engines: at least two, whose sinks are those of `sums`, in that order; nobody else calls them.
        sums: where their events go.
        sink: takes what all of them together have to say.
    """

    def __init__(self, engines: Sequence[Engine], sums: LoadSums, sink: events.Sink) -> None:
        sums.engines = self.engines = tuple(engines)
        first = engines[0]
        self.clocks = first.clocks
        self._emit = _AllEvents(self.engines, sums, sink, first.clocks)
        self._kept: list[RequestOutput] = []
        """Outputs of a step in which an engine died afterwards."""
        self._is_closed = False
        everyone: dict[str, Any] = {"scheduler": _Schedulers(self.engines), "pages": _Pools(self.engines), "runner": _Runners(self.engines)}
        self.scheduler, self.pages, self.runner = everyone["scheduler"], everyone["pages"], everyone["runner"]
        self.control = EngineControl(self, self._emit)

    @property
    def has_work(self) -> bool:
        """See `Engine`, as for all below."""
        return any(engine.has_work for engine in self.engines)

    @property
    def has_step(self) -> bool:
        return any(engine.has_step for engine in self.engines)

    @property
    def num_unfinished(self) -> int:
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def unfinished_ids(self) -> list[str]:
        return [request_id for engine in self.engines for request_id in engine.unfinished_ids]

    @property
    def num_in_flight(self) -> int:
        return sum(engine.num_in_flight for engine in self.engines)

    @property
    def is_dead(self) -> bool:
        return any(engine.is_dead for engine in self.engines)

    def add(self, request: Request) -> None:
        self.choose(request).add(request)

    def choose(self, request: Request) -> Engine:
        """Where a request goes. An id that is in use goes to its owner, who refuses it."""
        for engine in self.engines:
            if request.request_id in engine.unfinished_ids:
                return engine
        with_room = [engine for engine in self.engines if _has_room_for(engine, request)]
        prefix = PrefixChain(request.cache_salt)

        def rank(engine: Engine) -> tuple[int, int]:
            return -engine.pages.num_hit_pages(request.prompt_token_ids, prefix), pages_spoken_for(engine)

        return min(with_room or self.engines, key=rank)

    def abort(self, request_id: str) -> RequestOutput | None:
        outputs = (engine.abort(request_id) for engine in self.engines)
        return next((output for output in outputs if output is not None), None)

    def step(self) -> list[RequestOutput]:
        self.check_alive()
        outputs: list[RequestOutput] = []
        try:
            for engine in self.engines:
                if engine.has_step:
                    outputs += engine.step()
        except EngineDeadError as error:
            self._kept = outputs
            self.die(error)
            raise
        return outputs

    def die(self, error: Exception) -> None:
        for engine in self.engines:
            engine.die(error)
        self._emit.health("dead", str(error))

    def drain_failed(self) -> list[RequestOutput]:
        kept, self._kept = self._kept, []
        return kept + [output for engine in self.engines for output in engine.drain_failed()]

    def reject(self, request_id: str, error: Any, *, num_prompt_tokens: int = 0) -> None:
        self.engines[0].reject(request_id, error, num_prompt_tokens=num_prompt_tokens)

    def probe(self) -> None:
        try:
            for engine in self.engines:
                engine.probe()
        except EngineDeadError as error:
            self.die(error)
            raise

    def check_alive(self) -> None:
        for engine in self.engines:
            engine.check_alive()

    def copy_pool(self) -> PoolCopy:
        return join_pools([engine.copy_pool() for engine in self.engines], self.engines[0].scheduler.max_num_seqs)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        dead = next((engine for engine in self.engines if engine.is_dead), None)
        for engine in self.engines:
            engine.close()
        self._emit.stopped("" if dead is None else "a replica failed")


def pages_spoken_for(engine: Engine) -> int:
    """Pages in use, and those that the prompts of waiting requests will take: several requests may come between two steps."""
    waiting = (sequence for sequence in engine.scheduler.sequences if not any(sequence.tables))
    return engine.pages.num_in_use + sum(engine.pages.pages_for(len(sequence.token_ids)) for sequence in waiting)


def _has_room_for(engine: Engine, request: Request) -> bool:
    try:
        engine.scheduler.check_queue(len(request.prompt_token_ids))
    except QueueFullError:
        return False
    return True


class _Schedulers:
    """What is asked of a scheduler from outside an engine. All have the same limits."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._all = [engine.scheduler for engine in engines]
        self.most_prompt_tokens = self._all[0].most_prompt_tokens
        self.max_num_seqs = sum(scheduler.max_num_seqs for scheduler in self._all)

    @property
    def num_running(self) -> int:
        return sum(scheduler.num_running for scheduler in self._all)

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self._all)

    @property
    def is_paused(self) -> bool:
        return self._all[0].is_paused

    @property
    def is_draining(self) -> bool:
        return self._all[0].is_draining

    @property
    def is_drained(self) -> bool:
        return all(scheduler.is_drained for scheduler in self._all)

    @property
    def next_deadline_s(self) -> float | None:
        return min((due for scheduler in self._all if (due := scheduler.next_deadline_s) is not None), default=None)

    def check_fits(self, num_prompt: int) -> None:
        self._all[0].check_fits(num_prompt)

    def check_queue(self, num_prompt: int) -> None:
        """Raises QueueFullError when none has room."""
        for scheduler in self._all[:-1]:
            try:
                return scheduler.check_queue(num_prompt)
            except QueueFullError:
                continue
        return self._all[-1].check_queue(num_prompt)

    def pause(self) -> None:
        self._each(lambda scheduler: scheduler.pause())

    def drain(self) -> None:
        self._each(lambda scheduler: scheduler.drain())

    def resume(self) -> None:
        self._each(lambda scheduler: scheduler.resume())

    def reset_prefix_cache(self) -> None:
        self._each(lambda scheduler: scheduler.reset_prefix_cache())

    def evict_running(self) -> tuple[ModelSequence, ...]:
        return tuple(sequence for scheduler in self._all for sequence in scheduler.evict_running())

    def _each(self, work: Callable[[Any], None]) -> None:
        for scheduler in self._all:
            work(scheduler)


class _Pools:
    """Likewise of a page manager."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._all = [engine.pages for engine in engines]
        self.page_size = self._all[0].page_size

    @property
    def num_usable(self) -> int:
        return sum(pool.num_usable for pool in self._all)

    @property
    def num_in_use(self) -> int:
        return sum(pool.num_in_use for pool in self._all)

    @property
    def num_cached_idle(self) -> int:
        return sum(pool.num_cached_idle for pool in self._all)


class _Runners:
    """Likewise of a runner."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._all = [engine.runner for engine in engines]
        first = self._all[0]
        self.limits, self.page_size, self.num_pages, self.vocab = first.limits, first.page_size, first.num_pages, first.vocab

    @property
    def is_awake(self) -> bool:
        return all(runner.is_awake for runner in self._all)

    def sleep(self, *, keeps_weights: bool) -> None:
        for runner in self._all:
            runner.sleep(keeps_weights=keeps_weights)

    def wake_weights(self) -> None:
        for runner in self._all:
            runner.wake_weights()

    def wake_pool(self) -> None:
        for runner in self._all:
            runner.wake_pool()
