"""A model over a page pool of its own, fed chunk by chunk: what the engine does on the device, without the engine.

Whatever no sequence owns is NaN: the whole pool before it is written, so a read outside a sequence shows in its logits.
"""

import functools
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpaged.batch import BatchLayout, unpack
from jaxpaged.config import ModelConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.kv_layout import lay_out
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import DescribedModel, describe_model, load_model, make_replica
from jaxpaged.model_structure import make_structure
from jaxpaged.parallel.cuts import replica_shape
from jaxpaged.parallel.mesh_config import MeshShape
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import ScheduledRow
from jaxpaged.sequence import Sequence
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import LoadedModel
from tests.quick_programs import QUICKLY, TINY_BYTES

PAGE_SIZE = 16
MAX_SEQS = 8


def load(
    path: Path, dtype: str = "float32", *, max_model_len: int | Literal["auto"] = "auto", quantization: str | None = None
) -> LoadedModel:
    """The model in a folder or file, as the engine loads it on a CPU."""
    return load_described(path, describe(path, dtype, max_model_len=max_model_len, quantization=quantization))


def describe(
    path: Path, dtype: str = "float32", *, max_model_len: int | Literal["auto"] = "auto", quantization: str | None = None
) -> DescribedModel:
    """What the model is; its structure is traced once, however often it is loaded."""
    config = ModelConfig(model=str(path), dtype=dtype, max_model_len=max_model_len, quantization=quantization)
    with open_checkpoint(resolve(config)) as checkpoint:
        return describe_model(config, checkpoint, is_gpu=False)


def load_described(path: Path, described: DescribedModel, mesh: MeshShape | None = None) -> LoadedModel:
    """Its weights, on the first device or over the first ones of a mesh."""
    replica = None
    if mesh is not None:
        replica = make_replica(described, replica_shape(mesh, described.facts.kv_heads), jax.devices()[: mesh.num_devices])
    with open_checkpoint(resolve(ModelConfig(model=str(path)))) as checkpoint:
        return load_model(checkpoint, described, replica=replica)


def with_config(loaded: LoadedModel, config: Any) -> LoadedModel:
    """The same weights under another config of the same shapes."""
    return LoadedModel.of(make_structure(loaded.family, config), loaded.params)


@functools.cache
def step_program(graphdef: Any, treedef: Any, layout: BatchLayout, is_tiny: bool) -> Any:
    """Jitted (params, cache, blob) -> (float32 logits of every token [tokens, vocab], cache); models of one config share it."""

    return jax.jit(_step_of(graphdef, treedef, layout), donate_argnums=1, compiler_options=QUICKLY if is_tiny else None)


def sharded_program(loaded: LoadedModel, layout: BatchLayout) -> Any:
    """As `step_program`, of a model on several devices."""
    assert loaded.replica is not None
    pool = loaded.replica.pool.spec
    weights = tuple(leaf.sharding.spec for leaf in loaded.params)
    step = jax.shard_map(
        _step_of(loaded.graphdef, loaded.treedef, layout),
        mesh=loaded.replica.mesh,
        in_specs=(weights, KVCache(pool, pool), P()),
        out_specs=(P(), KVCache(pool, pool)),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=1)


def _step_of(graphdef: Any, treedef: Any, layout: BatchLayout) -> Any:
    def step(params: tuple[jax.Array, ...], cache: KVCache, blob: jax.Array) -> tuple[jax.Array, KVCache]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        hidden, cache = model(cache, unpack(blob, layout))
        return model.logits(hidden), cache

    return step


class PagedModel:
    """One model and its pool. Sequences take pages in the order of `pages`, which may be shuffled.

    Before each step the pages of windowed groups that the step's rows do not see are given back and filled with NaN.
    """

    def __init__(
        self, loaded: LoadedModel, *, context: int, num_pages: int | None = None, seed: int | None = None, gives_back: bool = True
    ) -> None:
        """Makes a pool of NaN.

        Args:
            context: tokens of one sequence at most; with the bucket it decides the program.
            num_pages: pages of the pool; None: room for one sequence.
            seed: shuffles the pages; None gives them out in order.
            gives_back: whether pages behind windows are spoiled; sequences may share pages only if not.
        """
        config = loaded.config
        layout = lay_out(config.windows)
        self.loaded, self.max_pages, self.groups = loaded, -(-context // PAGE_SIZE), layout.groups
        self.num_pages = (num_pages or self.max_pages + 1) * len(self.groups)
        dims = (layout.layers_per_group, self.num_pages, config.kv_heads, PAGE_SIZE, config.head_dim)
        if loaded.replica is None:
            self.cache = KVCache(jnp.full(dims, jnp.nan, config.dtype), jnp.full(dims, jnp.nan, config.dtype))
        else:
            self.cache = KVCache(*(jax.device_put(np.full(dims, np.nan, config.dtype), loaded.replica.pool) for _ in range(2)))
        self._sharded: dict[BatchLayout, Any] = {}
        self.gives_back = gives_back
        self.pages = list(range(1, self.num_pages))
        if seed is not None:
            np.random.default_rng(seed).shuffle(self.pages)

    def start(self, token_ids: Seq[int], *, shared: Sequence | None = None, num_shared: int = 0) -> Sequence:
        """A sequence with pages for all its tokens; the first `num_shared` tokens (whole pages) are those that `shared` has computed."""
        request = Request(request_id="", prompt_token_ids=list(token_ids), params=SamplingParams(temperature=0), seed=0, arrival_s=0)
        sequence = Sequence(request)
        if shared is not None:
            assert num_shared % PAGE_SIZE == 0
            assert num_shared <= shared.num_computed_tokens
            sequence.tables = tuple(table[: num_shared // PAGE_SIZE] for table in shared.tables)
            sequence.num_computed_tokens = num_shared
        else:
            sequence.tables = tuple([] for _ in self.groups)
        for table in sequence.tables:
            table.extend(self.pages.pop(0) for _ in range(-(-len(token_ids) // PAGE_SIZE) - len(table)))
        return sequence

    def feed(self, rows: Seq[tuple[Sequence, int]], bucket: int) -> list[np.ndarray]:
        """Runs one step of the next tokens of each sequence and returns their logits, [tokens, vocab] for each row."""
        layout = self.layout(bucket)
        if self.gives_back:
            self._give_back([sequence for sequence, _ in rows])
        scheduled = [
            ScheduledRow(sequence, count, sequence.num_computed_tokens, samples=True, slot=index, takes_from_slot=False, epoch=0)
            for index, (sequence, count) in enumerate(rows)
        ]
        blob = pack_alone(scheduled, layout, self.loaded.config.vocab)
        if self.loaded.replica is None:
            run = step_program(self.loaded.graphdef, self.loaded.treedef, layout, self.loaded.weight_bytes < TINY_BYTES)
        elif layout in self._sharded:
            run = self._sharded[layout]
        else:
            run = self._sharded[layout] = sharded_program(self.loaded, layout).lower(self.loaded.params, self.cache, blob).compile()
        logits, self.cache = run(self.loaded.params, self.cache, blob)
        ends = np.cumsum([count for _, count in rows])
        for sequence, count in rows:
            sequence.num_computed_tokens += count
        return np.split(np.asarray(logits), ends)[: len(rows)]

    @property
    def compiled(self) -> list[str]:
        """The programs over several devices, in XLA's words."""
        return [program.as_text() for program in self._sharded.values()]

    def layout(self, bucket: int) -> BatchLayout:
        """The program's."""
        return BatchLayout(bucket, min(bucket, MAX_SEQS), self.max_pages, PAGE_SIZE, self.num_pages, MAX_SEQS, len(self.groups))

    def _give_back(self, sequences: Seq[Sequence]) -> None:
        """Spoils what the next tokens do not see."""
        behind = []
        for sequence in sequences:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                first = group.first_page(sequence.num_computed_tokens, PAGE_SIZE)
                behind += [page for page in table[:first] if page]
                table[:first] = [0] * first
        if behind:
            self.cache = KVCache(*(pool.at[:, jnp.asarray(behind)].set(jnp.nan) for pool in self.cache))

    def feed_all(self, sequence: Sequence, chunk: int, bucket: int) -> np.ndarray:
        """Feeds what is left of a sequence in chunks and returns its logits, [tokens, vocab]."""
        parts = []
        while left := sequence.num_uncomputed_tokens:
            parts += self.feed([(sequence, min(chunk, left))], bucket)
        return np.concatenate(parts)
