"""Room 4 to 6: the model on its device, one compiled step per bucket, and the one call that reaches it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.batch import BatchLayout
from jaxpaged.config import CacheConfig, LogprobsMode
from jaxpaged.device_sleep import HostWeights
from jaxpaged.host_limits import return_freed_blocks, return_freed_memory
from jaxpaged.kernel_choice import ToldChoices
from jaxpaged.kv_cache import KVCache, cache_shape, count_pages, device_memory, make_cache, zeros
from jaxpaged.kv_groups import KVGroup, PageArithmetic
from jaxpaged.kv_layout import lay_out
from jaxpaged.logit_shaping import SlotRows
from jaxpaged.logprobs import StepResult
from jaxpaged.memory_errors import memory_budget
from jaxpaged.programs import CompilationWatch, Compiled, compile_all
from jaxpaged.settings import StepLimits
from jaxpaged.slot_rows import SlotRow
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import DeviceState, LoadedModel, StepProgram
from jaxpaged.traced_programs import TracedPrograms


@runtime_checkable
class Runner(Protocol):
    """What the engine needs of a device: only `run` and `write_slot` reach one in a step, in the order in which they are called.

    `np.asarray` of what `run` returns waits for the ids.
    """

    limits: StepLimits
    page_size: int
    num_pages: int
    vocab: int
    kv_groups: tuple[KVGroup, ...]

    def layout_for(self, num_tokens: int) -> BatchLayout: ...

    def run(self, layout: BatchLayout, blob: np.ndarray) -> Any: ...

    def write_slot(self, slot: int, row: SlotRow) -> None: ...

    @property
    def is_awake(self) -> bool: ...

    def sleep(self, *, keeps_weights: bool) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_pool(self) -> None: ...

    def close(self) -> None: ...


SLOT_BYTES_PER_TOKEN = 8
"""Of the vocabulary, for each slot: a count and a bias."""


def slot_bytes(num_slots: int, vocab: int, embed: int) -> int:
    """Bytes of what the device keeps of each slot: the last id, a count and a bias per token of the vocabulary, a hidden state."""
    return num_slots * (4 + SLOT_BYTES_PER_TOKEN * vocab + 4 * embed)


class ModelRunner:
    """Owns the weights, the page pool and the programs. Only the engine's thread calls `run`."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        limits: StepLimits,
        cache: CacheConfig,
        num_ids: int,
        max_parallel: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        traced: TracedPrograms | None = None,
        kernels: Mapping[str, str] = MappingProxyType({}),
        load_again: Callable[[], LoadedModel] | None = None,
        fits_context: bool = False,
        on_compiled: Callable[[Compiled], None] = lambda _: None,
        on_warmed: Callable[[int, int], None] = lambda *_: None,
        before_compiling: Callable[["ModelRunner"], None] = lambda _: None,
        agree_pages: Callable[[int], int] = int,
    ) -> None:
        """Allocates the pool, compiles every bucket and runs a first, empty step.

        Args:
            model: weights on the device.
            limits: sizes of a step.
            cache: page size, pool memory and type.
            num_ids: ids that the tokenizer knows; the rest of the head is never chosen.
            max_parallel: programs compiled at the same time.
            logprobs_mode: what requests are told that ask for log-probabilities.
            traced: where the tracing of programs is kept; None: nowhere.
            kernels: op -> the implementation that it must run with; the others take the best for the device.
            load_again: reads the weights anew, after a sleep that did not keep them; None: every sleep keeps them.
            fits_context: shorten the context to what the pool can hold ("auto").
            on_compiled: called for each program.
            on_warmed: called with the number of first steps that are done, and of all of them; with 0 before the first.
            before_compiling: called once the pool is there.
            agree_pages: of the pages that fit here, those that the pool gets: as many as fit everywhere.

        Raises:
            MemoryBudgetError: the pool does not fit.
            ConfigError: a kernel that was asked for does not take this model on this device.
        """
        self.limits, self.page_size, self.vocab = limits, cache.page_size, model.facts.vocab
        self._model, self._embed = model, model.facts.embed
        self._load_again = load_again
        self._host_weights: HostWeights | None = None
        self._replica = model.replica
        self.cache_shape = cache_shape(model.facts, cache, num_parts=model.replica.shape.pool_parts if model.replica else 1)
        self._step = StepProgram(
            model,
            self.cache_shape,
            num_ids=num_ids,
            logprobs_mode=logprobs_mode,
            traced=traced or TracedPrograms(None),
            kernels=kernels,
        )
        self.kv_groups = lay_out(model.facts.windows).groups
        arithmetic = PageArithmetic(self.kv_groups, cache.page_size)
        device = device_memory(model.replica.devices if model.replica else jax.local_devices()[:1])
        self._max_pages = arithmetic.pages_for(limits.max_model_len)
        self.num_pages = 2
        scratch = 0
        if device is not None and cache.memory is None:
            largest = self._layout(limits.token_buckets[-1])
            analysis = self._step.lower(largest).compile().memory_analysis()
            scratch = 0 if analysis is None else analysis.temp_size_in_bytes
        fitting_pages = count_pages(
            cache,
            self.cache_shape,
            least_pages=arithmetic.peak_pages(1),
            most_pages=limits.most_pages(arithmetic),
            device=device,
            temporary_bytes=scratch + self.slot_bytes,
        )
        self.num_pages = agree_pages(fitting_pages)
        fitting = arithmetic.most_tokens(self.num_pages - 1, limits.max_model_len)
        if fits_context:
            self.limits = limits._replace(max_model_len=fitting)
        # No page table gets longer, however long the context may be.
        self._max_pages = arithmetic.pages_for(fitting)
        self._state: DeviceState | None = self._new_state()
        self.layouts = tuple(self._layout(bucket) for bucket in limits.token_buckets)
        self._by_bucket = {layout.num_tokens: layout for layout in self.layouts}
        before_compiling(self)
        self.programs = compile_all(self._step.lower, self.layouts, max_parallel=max_parallel, on_compiled=on_compiled)
        return_freed_blocks()
        self._slot_writer = self._compile_slot_writer()
        self._watch = CompilationWatch()
        try:
            # The first call of a program on a GPU loads it and records its command buffers; on CPU one call shows that steps work.
            tried = self.layouts[:1] if device is None else self.layouts
            on_warmed(0, len(tried))
            for index, layout in enumerate(tried):
                np.asarray(self.run(layout, self._idle_blob(layout)))
                on_warmed(index + 1, len(tried))
        except BaseException:
            self._watch.close()
            raise

    @property
    def pool_bytes(self) -> int:
        """Bytes of the page pool on one device."""
        return self.num_pages * self.cache_shape.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of what the device keeps of all slots."""
        return slot_bytes(self.limits.max_num_seqs, self.vocab, self._embed)

    @property
    def told_kernels(self) -> ToldChoices:
        """Which kernels the programs have."""
        return self._step.told_choices

    @property
    def num_compiled_while_running(self) -> int:
        """Programs that the backend compiled inside `run`; 0 unless something is wrong."""
        return self._watch.num_compiled

    @property
    def pool(self) -> KVCache:
        """The pool as the last step left it."""
        assert self._state is not None, "the pool is asleep"
        return self._state.cache

    @property
    def is_awake(self) -> bool:
        """Whether weights and pool are on the device, so that `run` may be called."""
        return self._state is not None and bool(self._model.params)

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """The smallest bucket's layout that holds `num_tokens`."""
        return self._by_bucket[self.limits.bucket_for(num_tokens)]

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """Starts one step, behind those that were started before, and returns its results to come."""
        with self._watch.watching():
            result, self._state = self.programs[layout](self._model.params, self._state, blob)
            return result

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """Sets the rows of one slot, for the steps that are started from now on."""
        with self._watch.watching():
            assert self._state is not None
            self._state = self._state._replace(slots=self._slot_writer(self._state.slots, np.int32(slot), row.counts, row.bias))

    def sleep(self, *, keeps_weights: bool) -> None:
        """Gives the memory of weights and pool back. What the pool held is lost; the programs stay.

        Args:
            keeps_weights: in host memory; else they are read from their files again.
        """
        for array in jax.tree.leaves(self._state):
            array.delete()
        self._state = None
        params, self._model = self._model.params, self._model._replace(params=())
        if keeps_weights or self._load_again is None:
            self._host_weights = HostWeights(params) if params else self._host_weights
        else:
            self._host_weights = None
            for array in params:
                array.delete()
        return_freed_memory()

    def wake_weights(self) -> None:
        """Brings the weights back; those that are there stay.

        Raises:
            MemoryBudgetError: there is no room for them; they can be woken later.
        """
        if self._model.params:
            return
        with memory_budget():
            if self._host_weights is not None:
                self._model = self._model._replace(params=self._host_weights.to_device())
            else:
                assert self._load_again is not None
                self._model = self._load_again()
        self._host_weights = None

    def wake_pool(self) -> None:
        """Makes an empty pool; one that is there stays. Raises MemoryBudgetError."""
        if self._state is None:
            with memory_budget():
                self._state = jax.block_until_ready(self._new_state())

    def close(self) -> None:
        """Gives weights and pool back at once, whoever still holds this object."""
        self._watch.close()
        for array in jax.tree.leaves((self._model.params, self._state)):
            array.delete()
        self._host_weights = None
        self.programs = {}
        return_freed_memory()

    def _new_state(self) -> DeviceState:
        num_slots = self.limits.max_num_seqs
        whole, pool = (self._replica.whole, self._replica.pool) if self._replica else (None, None)
        counts = zeros((num_slots, self.vocab), jnp.int32, whole)
        bias = zeros((num_slots, self.vocab), jnp.float32, whole)
        pooled = zeros((num_slots, self._embed), jnp.float32, whole)
        last_ids = zeros((num_slots,), jnp.int32, whole)
        return DeviceState(make_cache(self.cache_shape, self.num_pages, pool), last_ids, SlotRows(counts, bias), pooled)

    def _layout(self, bucket: int) -> BatchLayout:
        return BatchLayout(
            bucket,
            self.limits.rows_of(bucket),
            self._max_pages,
            self.page_size,
            self.num_pages,
            self.limits.max_num_seqs,
            len(self.kv_groups),
        )

    def _compile_slot_writer(self) -> Any:
        def write(slots: SlotRows, slot: jax.Array, counts: jax.Array, bias: jax.Array) -> SlotRows:
            return SlotRows(slots.counts.at[slot].set(counts, mode="drop"), slots.bias.at[slot].set(bias, mode="drop"))

        assert self._state is not None
        whole = self._replica and self._replica.whole
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), self._state.slots)
        counts, bias = (jax.ShapeDtypeStruct((self.vocab,), dtype, sharding=whole) for dtype in (jnp.int32, jnp.float32))
        slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return jax.jit(write, donate_argnums=0).lower(shapes, slot, counts, bias).compile()

    def _idle_blob(self, layout: BatchLayout) -> np.ndarray:
        """A step in which nothing is live: it writes to no page."""
        return pack_alone((), layout, self.vocab)
