"""Seeded workloads: the same prompts, lengths and arrivals for every engine, with nothing but the standard library.

Token ids are drawn evenly from [3, vocab_size), so that no tokenizer is needed and a prompt has exactly as many tokens as it says.
Named workloads:

* `b1`: 1 request, 64 tokens in, 128 out.
* `mixedN`: N requests, prompts of 16 to 512 and answers of 16 to 256 tokens, log-uniform.
* `prefixN`: N requests that share 512 tokens, each with 16 to 64 of its own, 64 out.
* `batchN`: N requests, 64 in, 128 out.
* `lognormalN`: N requests as people send them: log-normal lengths with means of 161 in and 338 out, sigma 1.1, at most 2,048.
* `randomN`: N requests of the lengths that are asked for.
"""

import math
import random
import re
from typing import NamedTuple

from jaxpaged.errors import ConfigError
from jaxpaged.options import nearest

DEFAULT_VOCAB_SIZE = 49_152
"""SmolLM2's."""

SERVED_VOCAB_SIZE = 32_000
"""Of a server whose vocabulary is not known: nearly every model has these ids."""

FIRST_ID = 3
"""Lower ids are special tokens in most vocabularies."""

MIXED_PROMPT, MIXED_OUTPUT = (16, 512), (16, 256)
SHARED_TOKENS, OWN_TOKENS, PREFIX_OUTPUT = 512, (16, 64), 64
EVEN_PROMPT, EVEN_OUTPUT = 64, 128
LOGNORMAL_MEAN_PROMPT, LOGNORMAL_MEAN_OUTPUT, LOGNORMAL_SIGMA, LOGNORMAL_MAX = 161, 338, 1.1, 2_048
NAMES = ("b1", "mixed16", "prefix16", "batch16", "lognormal64", "random64")
MAX_REQUESTS = 100_000


class Job(NamedTuple):
    """A request: its prompt, how many tokens of answer somebody wants, and the seconds after the start at which it comes."""

    name: str
    prompt: list[int]
    num_output: int
    arrival_s: float = 0.0


class Lengths(NamedTuple):
    """Of `random`: tokens in and out; `spread` r draws each evenly from [(1 - r) n, (1 + r) n]."""

    num_prompt: int = 1024
    num_output: int = 128
    spread: float = 0.0


def make(name: str, *, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE, lengths: Lengths | None = None) -> list[Job]:
    """The requests of a named workload, all at time 0.

    Raises:
        ConfigError: an unknown name, or a number of requests out of 1 to 100,000.
    """
    found = re.fullmatch(r"([a-z]+)(\d*)", name)
    kind, number = (found[1], found[2]) if found else (name, "")
    if kind not in {known.rstrip("0123456789") for known in NAMES} or (kind == "b" and number != "1"):
        near = nearest(name, NAMES)
        raise ConfigError(f"there is no workload {name[:80]!r}; " + (f"the nearest is {near}" if near else f"known are {', '.join(NAMES)}"))
    count = int(number or 16)
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError(f"a workload has 1 to {MAX_REQUESTS:,} requests, got {count:,}")
    # The seed's text is that of the peers' scripts, so that all of them draw the same ids.
    rng = random.Random(f"{name}-{seed}")
    made = _drawn(kind, count, rng, vocab_size, lengths or Lengths())
    return [Job(str(index), prompt, num_output) for index, (prompt, num_output) in enumerate(made)]


def arriving(jobs: list[Job], rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[Job]:
    """The same requests at random moments.

    Args:
        rate: mean requests per second; infinite: all at time 0.
        burstiness: shape of the gamma distribution of the gaps: 1 is Poisson, lower is burstier, higher is evener (as in vLLM).

    Raises:
        ConfigError: rate or burstiness is not over 0.
    """
    if not rate > 0 or not 0 < burstiness < math.inf:
        raise ConfigError(f"request rate and burstiness must be over 0, got {rate} and {burstiness}")
    if math.isinf(rate):
        return jobs
    rng, at_s, made = random.Random(f"arrivals-{seed}"), 0.0, []
    for job in jobs:
        made.append(job._replace(arrival_s=at_s))
        at_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return made


def _drawn(kind: str, count: int, rng: random.Random, vocab_size: int, lengths: Lengths) -> list[tuple[list[int], int]]:
    """Prompt and number of output tokens of each request. The order of the draws is part of the workload."""

    def tokens(number: int) -> list[int]:
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(number)]

    match kind:
        case "mixed":
            return [(tokens(_log_uniform(rng, *MIXED_PROMPT)), _log_uniform(rng, *MIXED_OUTPUT)) for _ in range(count)]
        case "prefix":
            shared = tokens(SHARED_TOKENS)
            return [(shared + tokens(rng.randrange(OWN_TOKENS[0], OWN_TOKENS[1] + 1)), PREFIX_OUTPUT) for _ in range(count)]
        case "lognormal":
            return [(tokens(_log_normal(rng, LOGNORMAL_MEAN_PROMPT)), _log_normal(rng, LOGNORMAL_MEAN_OUTPUT)) for _ in range(count)]
        case "random":
            return [
                (tokens(_spread(rng, lengths.num_prompt, lengths.spread)), _spread(rng, lengths.num_output, lengths.spread))
                for _ in range(count)
            ]
        case _:
            return [(tokens(EVEN_PROMPT), EVEN_OUTPUT) for _ in range(count)]


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _log_normal(rng: random.Random, mean: int) -> int:
    """`mean` is that of the distribution before it is cut."""
    drawn = rng.lognormvariate(math.log(mean) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA)
    return min(LOGNORMAL_MAX, max(1, round(drawn)))


def _spread(rng: random.Random, number: int, spread: float) -> int:
    low, high = math.floor(number * (1 - spread)), math.ceil(number * (1 + spread))
    return max(1, rng.randint(low, high))
