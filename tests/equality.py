"""When two answers count as equal in float32, and what the model really thinks at the token where they part.

"Equal ids" means equal, or first differing where the margin of the first run is under `TIE_MARGIN`: the gap of the two largest
logits of a greedy row, the distance of the uniform draw to the edge of the chosen id's share of a sampled one. Beyond such a tie the
answers are different texts and are not compared.
"""

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.batch import BatchLayout, unpack
from jaxpaged.kv_cache import CacheShape, KVCache, make_cache
from jaxpaged.kv_layout import lay_out
from jaxpaged.model_runner import ModelRunner
from jaxpaged.request import Request, SamplingParams
from jaxpaged.sampling import uniform
from jaxpaged.scheduler import ScheduledRow, Sequence
from jaxpaged.step_packer import pack_alone

TIE_MARGIN = 1e-4
PAGE_SIZE = 16


class Tie(NamedTuple):
    """Where two answers parted although both were right."""

    what: str
    request_id: str
    position: int
    margin: float


class Oracle:
    """What the model says to a history that is computed alone and in one piece, by a program of its own.

    Args:
        runner: whose model it is.
        max_tokens: of a history.
    """

    def __init__(self, runner: ModelRunner, *, max_tokens: int) -> None:
        model, self._vocab = runner._model, runner.vocab
        groups, num_each = lay_out(model.config.windows).groups, -(-max_tokens // PAGE_SIZE)
        num_pages = len(groups) * num_each + 1
        self._layout = layout = BatchLayout(max_tokens, 2, num_each, PAGE_SIZE, num_pages, 2, len(groups))
        self._params = model.params
        self._cache_shape = CacheShape(
            lay_out(model.config.windows).layers_per_group, model.config.kv_heads, model.config.head_dim, PAGE_SIZE, model.config.dtype
        )

        def step(params: tuple[jax.Array, ...], cache: KVCache, blob: jax.Array) -> jax.Array:
            batch = unpack(blob, layout)
            built = nnx.merge(model.graphdef, jax.tree.unflatten(model.treedef, params))
            hidden, _ = built(cache, batch)
            return built.logits(hidden[batch.sample_tokens])

        self._step = jax.jit(step)

    def logits(self, token_ids: Seq[int]) -> np.ndarray:
        """Float32 logits of the id that follows `token_ids`."""
        params = SamplingParams(temperature=0.0)
        sequence = Sequence(Request(request_id="oracle", prompt_token_ids=list(token_ids), params=params, seed=0, arrival_s=0.0))
        num_each = self._layout.max_pages
        sequence.tables = tuple(list(range(1 + group * num_each, 1 + (group + 1) * num_each)) for group in range(self._layout.num_groups))
        blob = pack_alone(
            (ScheduledRow(sequence, len(token_ids), 0, True, slot=0, takes_from_slot=False, epoch=0),), self._layout, no_token=self._vocab
        )
        return np.asarray(self._step(self._params, make_cache(self._cache_shape, self._layout.num_pages), blob))[0]

    def margin(self, request: Request, history: Seq[int], chosen: int) -> float:
        """How far the choice of `chosen` after `history` is from another one; of sampled rows only temperature is understood."""
        logits = self.logits(history).astype(np.float64)
        params = request.params
        if params.is_greedy:
            top = np.sort(logits)[-2:]
            return float(top[1] - top[0])
        assert params.temperature is not None
        assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
        weights = np.exp((logits - logits.max()) / params.temperature)
        edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
        seed = jnp.asarray([[request.seed & 0xFFFFFFFF, request.seed >> 32]], jnp.uint32)
        draw = float(uniform(seed, jnp.asarray([len(history)], jnp.int32))[0])
        return float(np.abs(edges[[chosen, chosen + 1]] - draw).min())


class Equality:
    """Compares answers with those of the first run and keeps the ties. `num_compared` counts tokens."""

    def __init__(self, runner: ModelRunner, *, max_tokens: int) -> None:
        self._runner, self._max_tokens = runner, max_tokens
        self.ties: list[Tie] = []
        self.num_compared = 0

    @cached_property
    def oracle(self) -> Oracle:
        """Compiled when two answers part for the first time."""
        return Oracle(self._runner, max_tokens=self._max_tokens)

    def check(self, what: str, request: Request, first: Seq[int], second: Seq[int]) -> None:
        """Raises AssertionError when `second` is not equal to `first`, the answer to `request`, in the sense above."""
        for index, (expected, got) in enumerate(zip(first, second, strict=False)):
            self.num_compared += 1
            if expected == got:
                continue
            margin = self.oracle.margin(request, [*request.prompt_token_ids, *first[:index]], expected)
            assert margin < TIE_MARGIN, f"{what}: {request.request_id} says {got} instead of {expected} at {index}, margin {margin:.2g}"
            self.ties.append(Tie(what, request.request_id, index, margin))
            return
        assert len(first) == len(second), f"{what}: {request.request_id} has {len(second)} tokens instead of {len(first)}"

    def check_ties(self) -> None:
        """Raises AssertionError when there are more places with ties than one in 10,000 tokens (or one at all)."""
        places = {(tie.request_id, tie.position) for tie in self.ties}
        assert len(places) <= max(1, self.num_compared // 10_000), self.ties
