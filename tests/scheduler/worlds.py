"""Random worlds: limits, pool, arrivals, priorities, faults and everything else come from one seed, so a failing one replays exactly."""

import random
from collections import deque

from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import InvalidRequestError, QueueFullError
from jaxpaged.kv_groups import FULL, KVGroup
from jaxpaged.request import Request, samples_of
from jaxpaged.scheduler import ScheduledStep
from tests.scheduler.outcome import Outcome
from tests.scheduler.rules import Hopeful
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request

LEAST_STEPS = 300
"""Clients keep coming until so many steps were scheduled, unless the device is lost before."""


class World:
    """A simulation and the clients that trouble it."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        page_size = rng.choice((1, 2, 3, 4, 8))
        self.max_model_len = rng.choice((30, 50, 400))
        num_usable = rng.randint(max(8, 24 // page_size), 72 // page_size + 8)
        window = rng.choice((2, 5, 32))
        groups = rng.choice(((FULL,), (FULL,), (FULL, KVGroup(window)), (KVGroup(window), FULL), (KVGroup(window),)))
        self.simulation = Simulation(
            num_usable=num_usable,
            page_size=page_size,
            max_num_seqs=rng.choice((1, 2, 4, 8)),
            max_num_batched_tokens=rng.choice((1, 3, 8, 16, 64)),
            max_model_len=self.max_model_len,
            enable_prefix_caching=rng.random() < 0.8,
            groups=groups,
            depth=rng.choice((0, 1, 1, 2, 2)),
            policy=SchedulerConfig(
                reserve_pages=rng.choice((None, 0, num_usable // 4)),
                ageing_s=rng.choice((0.05, 0.5, 60.0)),
                target_itl_s=rng.choice((None, None, 0.02)),
                target_ttft_s=rng.choice((None, None, 0.2)),
                max_num_queued_requests=rng.choice((None, None, 6)),
                max_num_queued_tokens=rng.choice((None, None, 60)),
                queue_timeout_s=rng.choice((None, None, 1.0)),
                request_timeout_s=rng.choice((None, None, 2.0)),
            ),
            token_buckets=rng.choice(((), (2, 4, 8, 16, 32, 64))),
            cost=self.cost,
        )
        if rng.random() < 0.4:
            # It believes that every answer ends at once, so that pages run out often.
            self.simulation.scheduler._admission.lengths = Hopeful()
        pool = self.simulation.pages
        self.longest_prompt = min(self.max_model_len - 1, pool.arithmetic.most_tokens(num_usable, 60) - 1)
        self.families = [[rng.randrange(3) for _ in range(self.longest_prompt)] for _ in range(3)]
        self.arrivals: deque[float] = deque()
        duration = rng.choice((0.5, 2.0, 6.0))
        self.expect_clients(rng.randint(8, 50), duration)
        self.long_chance = rng.choice((0.1, 0.2, 0.7))
        self.priorities = rng.choice(((0,), (0,), (0, 1), (-1, 0, 0, 5)))
        self.abort_chance = rng.choice((0.0, 0.01, 0.05))
        self.reset_chance = rng.choice((0.0, 0.0, 0.02))
        self.slow_chance = rng.choice((0.0, 0.0, 0.05))
        self.fail_chance = rng.choice((0.0, 0.0, 0.02))
        self.pause_chance = rng.choice((0.0, 0.0, 0.01))
        self.drain_chance = rng.choice((0.0, 0.0, 0.01))
        self.evict_chance = rng.choice((0.0, 0.0, 0.01))
        self.dies_at = rng.randint(20, 300) if rng.random() < 0.05 else None
        self.floods_at = rng.randint(5, 200) if rng.random() < 0.1 else None
        self.leaps_at = rng.randint(5, 200) if rng.random() < 0.1 else None
        self.num_refused = 0

    def cost(self, step: ScheduledStep) -> float:
        seconds = 0.005 + 0.001 * sum(row.num_tokens for row in step.rows)
        return seconds * 20 if self.rng.random() < self.slow_chance else seconds

    def live(self) -> Outcome:
        """Lets everything happen; returns the counts.

        Raises:
            AssertionError: something is wrong with a step, a page, a count or an answer.
        """
        rng, simulation = self.rng, self.simulation
        for turn in range(20_000):
            while self.arrivals and self.arrivals[0] <= simulation.now:
                self.arrivals.popleft()
                self.arrive()
            self.disturb()
            if turn == self.floods_at:
                for _ in range(60):
                    self.arrive()
            if turn == self.leaps_at:
                # The process was stopped for a while.
                simulation.now += rng.choice((0.5, 30.0, 1000.0))
            if turn == self.dies_at:
                simulation.fail_all()
                break
            fails = frozenset(index for index in range(8) if rng.random() < self.fail_chance)
            simulation.step(between=self.disturb, fails=fails)
            self.look_at_texts()
            is_drained = simulation.scheduler.is_drained
            if simulation.is_idle or simulation.scheduler.is_paused or is_drained:
                if not self.arrivals and simulation.is_idle:
                    if simulation.outcome.num_steps >= LEAST_STEPS:
                        break
                    self.expect_clients(10, 2.0)
                simulation.now = max(simulation.now + 0.01, self.arrivals[0] if self.arrivals and simulation.is_idle else 0.0)
                if rng.random() < 0.3:
                    simulation.scheduler.resume()
        else:
            raise AssertionError(f"requests are left over: {simulation.scheduler.sequences}")
        assert len(simulation.ended) == simulation.num_added, "a request was lost"
        simulation.check_answers()
        simulation.check_idle()
        return simulation.outcome

    def expect_clients(self, count: int, duration_s: float) -> None:
        """Some more, from now on."""
        self.arrivals.extend(sorted(self.simulation.now + self.rng.uniform(0, duration_s) for _ in range(count)))

    def arrive(self) -> None:
        """A client comes with a request, or with several samples of one."""
        rng = self.rng
        family = rng.choice(self.families)
        length = rng.randint(1, self.longest_prompt if rng.random() < self.long_chance else min(12, self.longest_prompt))
        num_shared = rng.randint(0, length)
        max_tokens = rng.choice((None, 1, rng.randint(1, 60)))
        request = make_request(
            f"r{self.simulation.num_added + self.num_refused}",
            family[:num_shared] + [rng.randrange(3) for _ in range(length - num_shared)],
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, 1 if max_tokens is None else rng.randint(0, max_tokens))),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(rng.randrange(7),) if rng.random() < 0.2 else (),
            priority=rng.choice(self.priorities),
            cache_salt=rng.choice((None, None, None, "a", "b")),
        )
        for sample in samples_of(request, rng.randint(2, 4)) if rng.random() < 0.15 else [request]:
            self.add(sample)
        if rng.random() < 0.05 and (unfinished := self.simulation.scheduler.sequences):
            try:
                self.simulation.add(make_request(rng.choice(unfinished).request_id, [1]))
            except InvalidRequestError as error:
                assert "already in use" in error.message
            else:
                raise AssertionError("an id was taken twice")

    def add(self, request: Request) -> None:
        """The request is queued, or refused exactly when the queue is full."""
        scheduler, policy = self.simulation.scheduler, self.simulation.policy
        waiting = scheduler.sequences[scheduler.num_running :]
        most_requests, most_tokens = policy.max_num_queued_requests, policy.max_num_queued_tokens
        num_tokens = len(request.prompt_token_ids) + sum(sequence.num_prompt_tokens for sequence in waiting)
        is_full = most_requests is not None and len(waiting) >= most_requests
        is_full |= most_tokens is not None and bool(waiting) and num_tokens > most_tokens
        try:
            sequence = self.simulation.add(request)
        except QueueFullError:
            assert is_full, "a request was refused, and there was room"
            self.num_refused += 1
            return
        assert not is_full, "a request was queued, and the queue was full"
        sequence.needs_host |= self.rng.random() < 0.1

    def disturb(self) -> None:
        """What may happen at any moment."""
        rng, simulation = self.rng, self.simulation
        if rng.random() < self.abort_chance and (unfinished := simulation.scheduler.sequences):
            simulation.abort(rng.choice(unfinished).request_id)
        if rng.random() < self.reset_chance:
            simulation.reset_prefix_cache()
        if rng.random() < self.pause_chance:
            simulation.scheduler.pause()
        if rng.random() < self.drain_chance:
            simulation.scheduler.drain()
        if simulation.scheduler.is_draining and rng.random() < 0.1:
            simulation.scheduler.resume()
        if rng.random() < self.evict_chance:
            simulation.evict_running()

    def look_at_texts(self) -> None:
        """Now and then an answer turns out to hold a stop string."""
        for sequence in self.simulation.scheduler.sequences:
            if sequence.num_output_tokens and self.rng.random() < 0.005:
                self.simulation.finish(sequence, "a stop string")


def simulate(seed: int) -> Outcome:
    """One random world, from beginning to end.

    Raises:
        AssertionError: something is wrong with a step, a page, a count or an answer.
    """
    return World(seed).live()
