"""Room 5: the step as one function of arrays (model, sampler, log-probabilities), and its lowering for a bucket."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxpaged.batch import BatchLayout, take_ids_from_slots, unpack
from jaxpaged.config import LogprobsMode
from jaxpaged.kernel_choice import ToldChoices, kernel_error, told_choices
from jaxpaged.kv_cache import CacheShape, KVCache
from jaxpaged.logit_shaping import SlotRows, count_ids, shape_logits
from jaxpaged.logprobs import StepResult, answer_logprobs, prompt_logprobs
from jaxpaged.model_structure import ModelFacts, ModelStructure, facts_of
from jaxpaged.parallel.replica import Replica
from jaxpaged.pooling import keep_sums, pool_rows
from jaxpaged.sampling import sample
from jaxpaged.stages import stage
from jaxpaged.traced_programs import TracedPrograms, serialized_as
from pallas_kernels.dispatch import UnsupportedKernelError
from pallas_kernels.quantized_matmul import cpu as int8_matmul


class LoadedModel(NamedTuple):
    """A model's facts and weights: parameter leaves in the order of its structure, which is made when it is first asked for.

    `replica`: the devices that share them; None: they lie on one.
    """

    facts: ModelFacts
    structure: Callable[[], ModelStructure]
    params: tuple[jax.Array, ...]
    replica: Replica | None = None

    @classmethod
    def of(cls, structure: ModelStructure, params: tuple[jax.Array, ...]) -> "LoadedModel":
        """A model whose structure is there already."""
        return cls(facts_of(structure.config, structure.quantization, structure.eight_bit), lambda: structure, params)

    @property
    def family(self) -> Any:
        """The family's module."""
        return self.structure().family

    @property
    def config(self) -> Any:
        """The family's `Config`."""
        return self.structure().config

    @property
    def graphdef(self) -> Any:
        """What `nnx.merge` takes beside the parameters."""
        return self.structure().graphdef

    @property
    def treedef(self) -> Any:
        """How the leaves make up the parameters' tree."""
        return self.structure().treedef

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(leaf.nbytes for leaf in self.params)


class DeviceState(NamedTuple):
    """What a step changes on the device; donated, so that it is changed in place."""

    cache: KVCache
    last_ids: Int32[Array, "slots"]
    slots: SlotRows
    pooled: Float[Array, "slots embed"]


for kind in (DeviceState, KVCache, SlotRows, StepResult):
    serialized_as(kind, serialized_name=f"jaxpaged.{kind.__name__}")


class StepProgram:
    """Makes the program of a bucket. All that it is built from stands in `_fixed`, or one engine would get another's program."""

    def __init__(
        self,
        model: LoadedModel,
        cache_shape: CacheShape,
        *,
        num_ids: int,
        traced: TracedPrograms,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        kernels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._structure = model.structure
        self._replica = model.replica
        shardings = [leaf.sharding if model.replica else None for leaf in model.params]
        self._params = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf, sharding in zip(model.params, shardings, strict=True)
        )
        self._cache_shape, self._num_ids, self._logprobs_mode = cache_shape, num_ids, logprobs_mode
        self._vocab, self._embed = model.facts.vocab, model.facts.embed
        # Which native kernels a processor has decides what is traced, and a program that was traced with them must find them.
        native_rows = int8_matmul.max_rows()
        self._fixed = (model.facts.words, model.facts.quantization, model.facts.eight_bit, native_rows, cache_shape, num_ids, logprobs_mode)
        self._traced, self._kernels = traced, kernels

    @property
    def told_choices(self) -> ToldChoices:
        """Which kernels the programs so far have."""
        return told_choices(self._traced.choices)

    def function(self, layout: BatchLayout) -> Callable[[tuple[jax.Array, ...], DeviceState, jax.Array], tuple[StepResult, DeviceState]]:
        """The step of a bucket, for tracing."""

        def step(params: tuple[jax.Array, ...], state: DeviceState, blob: jax.Array) -> tuple[StepResult, DeviceState]:
            from flax import nnx  # late: it is needed only where a program is traced

            with stage("unpack"):
                batch = take_ids_from_slots(unpack(blob, layout), state.last_ids)
            structure = self._structure()
            model = nnx.merge(structure.graphdef, jax.tree.unflatten(structure.treedef, params))
            hidden, cache = model(state.cache, batch)
            rows, targets = batch.sampling, batch.target_slots
            with stage("head"):
                logits = model.logits(hidden[batch.sample_tokens])
            with stage("shape_logits"):
                shaped = shape_logits(logits, rows, state.slots, targets)
            with stage("sample"):
                ids = sample(shaped, rows, self._num_ids)
            # A chunk in the middle of a prompt chooses nothing, whatever its request wants of the answer.
            wanted = (targets < layout.num_slots) & (rows.num_logprobs >= 0)
            with stage("logprobs"):
                of_answers = answer_logprobs(logits, shaped, ids, rows, wanted, self._num_ids, self._logprobs_mode)
                of_prompts = prompt_logprobs(hidden, batch.scored, model.logits, self._num_ids, self._logprobs_mode)
            with stage("pool"):
                pooled = pool_rows(hidden, batch, state.pooled)
            result = StepResult(ids, of_answers, of_prompts, pooled)
            with stage("slots"):
                last_ids = state.last_ids.at[targets].set(ids, mode="drop")
                counted = count_ids(state.slots, rows, targets, ids)
                return result, DeviceState(cache, last_ids, counted, keep_sums(state.pooled, batch, pooled))

        # Traces and dumps show programs by this name.
        step.__name__ = f"step_{layout.num_tokens}"
        return step

    def lower(self, layout: BatchLayout) -> jax.stages.Lowered:
        """Lowers the step for one layout.

        Raises:
            ConfigError: a kernel that was asked for does not take this model on this device.
        """
        step = self.function(layout)
        blob = jax.ShapeDtypeStruct((layout.blob_size,), jnp.int32, sharding=self._replica and self._replica.whole)
        args, fixed = (self._params, self._state(layout), blob), repr((self._fixed, layout))
        try:
            if self._replica is None:
                return self._traced.lower(step, args, donate=1, fixed=fixed, name=step.__name__, kernels=self._kernels)
            _, state, _ = specs = jax.tree.map(lambda like: like.sharding.spec, args)
            # What comes out beside the state is the same on every device, as all that it is computed from is: JAX cannot know.
            sharded = jax.shard_map(step, mesh=self._replica.mesh, in_specs=specs, out_specs=(PartitionSpec(), state), check_vma=False)
            return self._traced.lower_unkept(jax.jit(sharded, donate_argnums=1), args, kernels=self._kernels)
        except UnsupportedKernelError as error:
            raise kernel_error(error) from error

    def _state(self, layout: BatchLayout) -> Any:
        """Shapes and types of `DeviceState`."""
        shape, num_slots = self._cache_shape, layout.num_slots
        dims = (shape.layers, layout.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        whole = self._replica and self._replica.whole
        pool = jax.ShapeDtypeStruct(dims, shape.dtype, sharding=self._replica and self._replica.pool)
        last_ids = jax.ShapeDtypeStruct((num_slots,), jnp.int32, sharding=whole)
        counts = jax.ShapeDtypeStruct((num_slots, self._vocab), jnp.int32, sharding=whole)
        bias = jax.ShapeDtypeStruct((num_slots, self._vocab), jnp.float32, sharding=whole)
        pooled = jax.ShapeDtypeStruct((num_slots, self._embed), jnp.float32, sharding=whole)
        return DeviceState(KVCache(pool, pool), last_ids, SlotRows(counts, bias), pooled)  # type: ignore[arg-type]  # shapes stand for arrays
