"""Engines driven into each state that `jaxpaged diagnose` knows, with figures drawn from a seed; near misses; and healthy ones."""

import random
from collections.abc import Callable, Mapping

from jaxpaged import events
from jaxpaged.config import SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.observability.driven import World
from tests.observability.samples import START_S

type Trace = list[events.Event]
type Drive = Callable[[Tokenizer, int], Trace]

SHORT = (10, 20, 30, 40)
ANSWERS = (20, 30, 40)
GOOD_NUMBERS = (10, 11, 12, 13, 22, 24, 26)
"""Of clients: rows that nearly fill their bucket and not the 32 rows of a step."""


def steady(tokenizer: Tokenizer, seed: int, seconds: float = 8.0, **settings: object) -> World:
    """A healthy load: neither few nor many clients, pages in half of the pool."""
    rng = random.Random(seed)
    number = rng.choice(GOOD_NUMBERS)
    fields: dict[str, object] = {"step_s": rng.uniform(0.03, 0.06), "num_pages": number * 7, **settings}
    world = World(tokenizer, seed, **fields)  # type: ignore[arg-type]
    world.clients(number, seconds, SHORT, ANSWERS)
    return world


def healthy(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed).run(8.0)


def compiling(tokenizer: Tokenizer, seed: int) -> Trace:
    return _with_program(tokenizer, seed, after_ready=True)


def not_compiling(tokenizer: Tokenizer, seed: int) -> Trace:
    return _with_program(tokenizer, seed, after_ready=False)


def _with_program(tokenizer: Tokenizer, seed: int, *, after_ready: bool) -> Trace:
    rng, world = random.Random(seed), steady(tokenizer, seed)
    seconds = rng.uniform(0.5, 20.0) if after_ready else 0.01

    def compile_it() -> None:
        world.now += seconds
        world.log(
            events.ProgramCompiled(time_s=START_S + world.now, bucket_tokens=8, seconds=seconds, from_cache=False, after_ready=after_ready)
        )

    world.during_step_at(rng.uniform(2, 5), compile_it)
    return world.run(8.0 + seconds)


def stuck(tokenizer: Tokenizer, seed: int) -> Trace:
    return _hanging(tokenizer, seed, random.Random(seed).uniform(14, 60))


def slow_step(tokenizer: Tokenizer, seed: int) -> Trace:
    return _hanging(tokenizer, seed, random.Random(seed).uniform(2, 7))


def _hanging(tokenizer: Tokenizer, seed: int, seconds: float) -> Trace:
    world = steady(tokenizer, seed)

    def hang() -> None:
        end_s = world.now + seconds
        while world.now < end_s:  # others still ask whether the server is well
            world.now += 0.5
            world.answered("probe", 0.001, end="", path="/readyz", status=503)

    world.during_step_at(random.Random(seed).uniform(2, 4), hang)
    return world.run(8.0 + seconds)


def slow_path(tokenizer: Tokenizer, seed: int) -> Trace:
    dtype, attention = random.Random(seed).choice((("float32", ""), ("float32", "mosaic_gpu"), ("bfloat16", "xla")))
    return steady(tokenizer, seed, platform="gpu", dtype=dtype, attention=attention).run(8.0)


def fast_path(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed, platform="gpu", dtype="bfloat16", attention="mosaic_gpu").run(8.0)


def slow_clients(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed, http_lag_s=random.Random(seed).uniform(5, 20)).run(8.0)


def usual_clients(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed, http_lag_s=random.Random(seed).uniform(0.0, 0.6)).run(8.0)


def pool_full(tokenizer: Tokenizer, seed: int) -> Trace:
    """Answers become longer than those before them: what looked as if it had room is preempted; later ones wait for pages."""
    rng = random.Random(seed)
    world = World(tokenizer, seed, num_pages=rng.randint(40, 60), step_s=rng.uniform(0.04, 0.06))
    for _ in range(12):
        world.arrive(0.0, 16, 4)
    world.clients(26, 12.0, (16, 32), (100, 120), from_s=1.0)
    return world.run(12.0)


def pool_near_full(tokenizer: Tokenizer, seed: int) -> Trace:
    """The same clients with pages for all of them."""
    rng = random.Random(seed)
    world = World(tokenizer, seed, num_pages=320, step_s=rng.uniform(0.04, 0.06))
    world.clients(26, 12.0, (16, 32), (100, 120))
    return world.run(12.0)


def row_limit(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    rows = rng.choice((4, 6, 7, 8))
    world = World(tokenizer, seed, max_num_seqs=rows, num_pages=rows * rng.randint(8, 20), step_s=rng.uniform(0.03, 0.06))
    world.clients(rows * rng.randint(2, 3), 9.0, SHORT, ANSWERS)
    return world.run(9.0)


def rows_just_enough(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    rows = rng.choice((6, 7, 8))
    world = World(tokenizer, seed, max_num_seqs=rows, num_pages=rows * 8, step_s=rng.uniform(0.03, 0.06))
    world.clients(rows, 9.0, SHORT, ANSWERS)
    return world.run(9.0)


def batch_too_small(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_batched_tokens=rng.choice((12, 16, 20)), step_s=rng.uniform(0.02, 0.04), num_pages=4000)
    world.clients(30, 10.0, (100, 150, 200), (10, 15))
    return world.run(10.0)


def batch_large_enough(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_batched_tokens=512, step_s=rng.uniform(0.02, 0.04), num_pages=800)
    world.clients(24, 8.0, (30, 40), (30, 40))
    return world.run(8.0)


def overloaded(tokenizer: Tokenizer, seed: int) -> Trace:
    """More comes than goes, for minutes, with rows and pages in use."""
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_seqs=8, num_pages=rng.randint(82, 88), step_s=rng.uniform(0.25, 0.35))
    world.arrivals(rng.uniform(2.5, 4.0), 0.0, 100.0, (110, 120, 130), (16, 22))
    return world.run(100.0)


def busy_for_a_while(tokenizer: Tokenizer, seed: int) -> Trace:
    """A burst that is served in half a minute, among times with a usual load."""
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_seqs=8, num_pages=46, step_s=rng.uniform(0.05, 0.07))
    world.clients(6, 90.0, (10, 14), (16, 22))
    for _ in range(30):
        world.arrive(20.0, 14, 22)
    return world.run(90.0)


def giant_prompt(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = steady(tokenizer, seed, 10.0, num_pages=1000, token_s=0.0008, step_s=0.02)
    world.arrive(rng.uniform(2, 4), rng.randint(2100, 5000), 5)
    return world.run(10.0)


def longer_prompt(tokenizer: Tokenizer, seed: int) -> Trace:
    world = steady(tokenizer, seed, 10.0, num_pages=200, token_s=0.0008, step_s=0.02)
    world.arrive(3.0, random.Random(seed).randint(60, 90), 5)
    return world.run(10.0)


def prefill_blocks_decode(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, num_pages=1200, step_s=0.02, token_s=rng.uniform(0.0007, 0.001))
    world.clients(10, 9.0, (250, 300, 350, 400), (50, 60, 80), think_s=0.5)
    return world.run(9.0)


def prefill_beside_decode(tokenizer: Tokenizer, seed: int) -> Trace:
    """The same, with a target for the gaps."""
    world = World(
        tokenizer,
        seed,
        num_pages=600,
        step_s=0.02,
        token_s=0.0001,
        policy=SchedulerConfig(target_itl_s=random.Random(seed).uniform(0.04, 0.06)),
    )
    world.clients(13, 9.0, (150, 200, 250), (30, 40, 60), think_s=0.2)
    return world.run(9.0)


def host_bound(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    step_s = rng.uniform(0.008, 0.02)
    return steady(tokenizer, seed, step_s=step_s, host_s=step_s * rng.uniform(1.3, 3.0)).run(6.0)


def host_beside_device(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed, step_s=0.03, host_s=0.03 * random.Random(seed).uniform(0.3, 0.7)).run(8.0)


def padding_waste(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_seqs=64, num_pages=300, step_s=rng.uniform(0.03, 0.06))
    world.clients(rng.choice((33, 34)), 8.0, (6, 8), (80, 100, 120))
    return world.run(8.0)


def little_padding(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, max_num_seqs=32, num_pages=200, step_s=rng.uniform(0.03, 0.06))
    world.clients(rng.choice((23, 25)), 8.0, (6, 8), (60, 80, 100))
    return world.run(8.0)


def batch_jitter(tokenizer: Tokenizer, seed: int) -> Trace:
    """Bursts, all at once and all of one length."""
    rng = random.Random(seed)
    period_s, number = rng.uniform(3.0, 4.0), rng.randint(22, 30)
    world = World(tokenizer, seed, num_pages=200, step_s=0.05)
    for burst in range(6):
        for _ in range(number):
            world.arrive(burst * period_s, 20, 30)
    world.clients(2, 6 * period_s, (10,), (20,))
    return world.run(6 * period_s)


def two_bursts(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = steady(tokenizer, seed, 14.0, num_pages=250)
    for at_s in (4.0, 10.0):
        for _ in range(rng.randint(3, 5)):
            world.arrive(at_s, 20, 30)
    return world.run(14.0)


def device_bound(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    return steady(tokenizer, seed, 20.0, step_s=rng.uniform(0.14, 0.3)).run(20.0)


def device_fast_enough(tokenizer: Tokenizer, seed: int) -> Trace:
    return steady(tokenizer, seed, step_s=random.Random(seed).uniform(0.06, 0.08)).run(8.0)


def too_few_requests(tokenizer: Tokenizer, seed: int) -> Trace:
    rng = random.Random(seed)
    world = World(tokenizer, seed, num_pages=400, step_s=rng.uniform(0.03, 0.06))
    world.clients(rng.choice((1, 2, 3, 4)), 8.0, SHORT, ANSWERS)
    return world.run(8.0)


def light_load(tokenizer: Tokenizer, seed: int) -> Trace:
    """Few requests, and an engine that is idle most of the time: nobody waits for anything."""
    rng = random.Random(seed)
    world = World(tokenizer, seed, num_pages=400, step_s=rng.uniform(0.03, 0.04))
    world.arrivals(0.25, 0.0, 30.0, SHORT, (20,))
    return world.run(30.0)


STATES: Mapping[str, tuple[Drive, Drive]] = {
    "compiling": (compiling, not_compiling),
    "stuck": (stuck, slow_step),
    "slow_path": (slow_path, fast_path),
    "slow_clients": (slow_clients, usual_clients),
    "pool_full": (pool_full, pool_near_full),
    "row_limit": (row_limit, rows_just_enough),
    "batch_too_small": (batch_too_small, batch_large_enough),
    "overloaded": (overloaded, busy_for_a_while),
    "giant_prompt": (giant_prompt, longer_prompt),
    "prefill_blocks_decode": (prefill_blocks_decode, prefill_beside_decode),
    "host_bound": (host_bound, host_beside_device),
    "padding_waste": (padding_waste, little_padding),
    "batch_jitter": (batch_jitter, two_bursts),
    "device_bound": (device_bound, device_fast_enough),
    "too_few_requests": (too_few_requests, light_load),
}
"""Finding -> what drives an engine into it, and what comes near it without being it."""
