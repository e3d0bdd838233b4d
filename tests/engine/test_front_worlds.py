"""D1 with the front queues: random worlds of clients, event loops, the engine thread's turns and a scripted device, on one seed each."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxpaged.tokenizer import Tokenizer
from tests.engine.front_clients import Habit
from tests.engine.front_worlds import simulate_front
from tests.engine.planted_front_bugs import FRONT_BUGS, TURN_BUGS, PlantedBug
from tests.engine.turn_worlds import simulate_turns

pytestmark = pytest.mark.jax

WORLDS_PER_TEST = 20
LONG_WORLDS_PER_TEST = 500
NOTICED = (AssertionError,)
SEARCHED = range(100_000, 100_200)
"""Seeds of the long search, none of which was looked at when the bugs were planted."""


def simulate_all(seeds: range, tokenizer: Tokenizer) -> None:
    """Runs all worlds, which must be as rough as they are meant to be."""
    ends: Counter[tuple[Habit, str]] = Counter()
    for seed in seeds:
        try:
            trace = simulate_front(seed, tokenizer)
        except Exception as error:
            error.add_note(f"replay with tests.engine.front_worlds.simulate_front({seed}, tokenizer)")
            raise
        for _, habit, reason, error, _ in trace:
            ends[habit, str(reason or error)[:8]] += 1  # type: ignore[index]
    for habit in Habit:
        assert ends[habit, "length"] >= len(seeds) // 4, f"hardly a request came to its end: {habit}"
        assert ends[habit, "abort"] >= len(seeds) // 5, f"hardly a request was aborted: {habit}"
    for error in ("EngineDe", "QueueFul", "InvalidR"):
        assert sum(count for (_, reason), count in ends.items() if reason == error) >= len(seeds) // 10, f"too few of {error}"


@pytest.mark.parametrize("first_seed", range(0, 40, WORLDS_PER_TEST))
def test_front_worlds(first_seed: int, script_tokenizer: Tokenizer) -> None:
    simulate_all(range(first_seed, first_seed + WORLDS_PER_TEST), script_tokenizer)


@pytest.mark.tier("long", area="pages")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first_seed", range(0, 5_000, LONG_WORLDS_PER_TEST))
def test_many_front_worlds(first_seed: int, script_tokenizer: Tokenizer) -> None:
    simulate_all(range(first_seed, first_seed + LONG_WORLDS_PER_TEST), script_tokenizer)


@pytest.mark.parametrize("bug", FRONT_BUGS, ids=lambda bug: bug.plant.__name__)
def test_its_world_notices(bug: PlantedBug, script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded world is sound without the bug (`test_front_worlds` covers all of them) and not with it."""
    assert bug.seed < 40
    bug.plant(monkeypatch)
    with pytest.raises(NOTICED):
        simulate_front(bug.seed, script_tokenizer)


@pytest.mark.tier("long", area="pages")
@pytest.mark.parametrize("bug", FRONT_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_search_notices(bug: PlantedBug, script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(NOTICED):
        for seed in SEARCHED:
            simulate_front(seed, script_tokenizer)


@pytest.mark.parametrize("first_seed", range(0, 40, WORLDS_PER_TEST))
def test_turn_worlds(first_seed: int, script_tokenizer: Tokenizer) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + WORLDS_PER_TEST):
        trace = simulate_turns(seed, script_tokenizer)
        assert seed != first_seed or trace == simulate_turns(seed, script_tokenizer), "a seed does not replay"
        ends.update(str(reason) for _, reason in trace)
    assert all(ends[reason] >= WORLDS_PER_TEST for reason in ("length", "abort", "None")), ends  # None: left, or the device was lost


@pytest.mark.tier("long", area="pages")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first_seed", range(0, 5_000, LONG_WORLDS_PER_TEST))
def test_many_turn_worlds(first_seed: int, script_tokenizer: Tokenizer) -> None:
    for seed in range(first_seed, first_seed + LONG_WORLDS_PER_TEST):
        simulate_turns(seed, script_tokenizer)


@pytest.mark.parametrize("bug", TURN_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_world_of_turns_notices(bug: PlantedBug, script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(NOTICED):
        simulate_turns(bug.seed, script_tokenizer)


TRACE_SCRIPT = """
import hashlib, sys
from tests.engine.front_worlds import simulate_front
from tests.text.vocabularies import byte_level
for seed in map(int, sys.argv[1:]):
    print(hashlib.sha256(repr(simulate_front(seed, byte_level())).encode()).hexdigest())
"""


def test_a_seed_replays_exactly(script_tokenizer: Tokenizer) -> None:
    """Every output, time and error, here again and in another process that hashes otherwise."""
    seeds = (3, 16)
    first, second = ([repr(simulate_front(seed, script_tokenizer)) for seed in seeds] for _ in range(2))
    assert first == second
    done = subprocess.run(
        [sys.executable, "-c", TRACE_SCRIPT, *map(str, seeds)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [hashlib.sha256(trace.encode()).hexdigest() for trace in first]
