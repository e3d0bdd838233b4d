"""How a model fits in memory, worked out before any weight is read: weights, a step, the page pool, and what the pool can hold.

All but the memory of a step is exact; of a step only the compiler knows, so that it is guessed, and rather too high.
"""

from typing import NamedTuple

import msgspec

from jaxpaged.config import Config
from jaxpaged.errors import MemoryBudgetError
from jaxpaged.kv_cache import GPU_RESERVE_FRACTION, DeviceMemory, cache_shape, count_pages
from jaxpaged.kv_groups import PageArithmetic
from jaxpaged.kv_layout import lay_out
from jaxpaged.model_runner import slot_bytes
from jaxpaged.model_structure import ModelFacts
from jaxpaged.parallel.mesh_config import MeshShape
from jaxpaged.parameter_sizes import ParameterSize, mesh_parts, weight_bytes
from jaxpaged.settings import StepLimits

_FLOAT_BYTES = 4
_LOGIT_ARRAYS = 6
"""Arrays of logits that the sampler holds at the same time: raw, shaped, sorted, summed, noise and shares."""


class Room(NamedTuple):
    """Memory of one device.

    Attributes:
        limit_bytes: what the engine may use, `cache.gpu_memory_utilization` taken off already.
        in_use_bytes: what of that is used already.
        takes_all: whether the pool gets what is left (GPU); on CPU its size is given, and the rest stays the machine's.
    """

    limit_bytes: int
    in_use_bytes: int = 0
    takes_all: bool = True


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What lies on each of `num_devices` devices that share one copy of the model, tensor x expert of them.

    Attributes:
        room_bytes: memory of a device that the engine may use and nobody uses yet.
        step_bytes: of a step in work, and of what the sampler keeps of each slot.
        least_bytes: of the smallest pool that can work: one request at full length where its length was asked for, else one token.
        num_pages: page 0, which nobody gets, included.
        max_model_len: with "auto" what the pool holds.
        tokens: that fit in all pages; in models with windows at least so many.
        full_requests: requests of `max_model_len` at the same time.
        fits: whether all this can be.
    """

    num_devices: int
    tensor: int
    expert: int
    dtype_name: str
    cache_dtype_name: str
    room_bytes: int
    weight_bytes: int
    step_bytes: int
    pool_bytes: int
    least_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    tokens: int
    full_requests: int
    fits: bool

    @property
    def needed_bytes(self) -> int:
        """Bytes under which it cannot work."""
        return self.weight_bytes + self.step_bytes + self.least_bytes


def plan_memory(
    config: Config, facts: ModelFacts, sizes: tuple[ParameterSize, ...], limits: StepLimits, room: Room, mesh: MeshShape
) -> MemoryPlan:
    """Works it out.

    Args:
        config: the pool's options, and whether the longest text is given, "auto" or the model's.
        facts: sizes of the model.
        sizes: of its parameters.
        limits: of a step.
        room: memory of each device.
        mesh: the devices of one copy.
    """
    cache, layout = config.cache, lay_out(facts.windows)
    parts = mesh_parts(mesh, facts.kv_heads)
    arithmetic = PageArithmetic(layout.groups, cache.page_size)
    shape = cache_shape(facts, cache, num_parts=parts.get("kv_heads", 1))
    weights = weight_bytes(sizes, parts)
    kept = slot_bytes(limits.max_num_seqs, facts.vocab, facts.embed)
    scratch = _scratch_bytes(facts, sizes, limits, parts)
    wants_length = isinstance(config.model.max_model_len, int)
    least_pages = arithmetic.peak_pages(limits.max_model_len if wants_length else 1)
    try:
        num_pages = count_pages(
            cache,
            shape,
            least_pages=arithmetic.peak_pages(1),
            most_pages=limits.most_pages(arithmetic),
            device=DeviceMemory(room.limit_bytes, room.in_use_bytes + weights) if room.takes_all else None,
            temporary_bytes=scratch + kept,
        )
    except MemoryBudgetError:
        num_pages = 0
    usable = max(num_pages - 1, 0)
    max_model_len = limits.max_model_len
    if config.model.max_model_len == "auto":
        max_model_len = arithmetic.most_tokens(usable, max_model_len)
    free = room.limit_bytes - room.in_use_bytes - (int(GPU_RESERVE_FRACTION * room.limit_bytes) if room.takes_all else 0)
    pool_bytes = num_pages * shape.page_bytes
    return MemoryPlan(
        num_devices=mesh.devices_per_replica,
        tensor=mesh.tensor,
        expert=mesh.expert,
        dtype_name=facts.dtype_name,
        cache_dtype_name=str(shape.dtype),
        room_bytes=free,
        weight_bytes=weights,
        step_bytes=scratch + kept,
        pool_bytes=pool_bytes,
        least_bytes=(1 + least_pages) * shape.page_bytes,
        page_size=cache.page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        tokens=usable * cache.page_size // len(layout.groups),
        full_requests=usable // arithmetic.peak_pages(max(max_model_len, 1)),
        fits=usable >= least_pages and max_model_len >= 2 and weights + scratch + kept + pool_bytes <= free,
    )


def _scratch_bytes(facts: ModelFacts, sizes: tuple[ParameterSize, ...], limits: StepLimits, parts: dict[str, int]) -> int:
    """Bytes of the arrays that the largest step works with: activations of its tokens in one layer, and logits of its rows."""
    tokens = limits.token_buckets[-1]
    outputs = sum(size.shape[-2] for size in sizes if size.axes[0] == "layers" and len(size.shape) > 2)
    activations = tokens * (8 * facts.embed + outputs // parts.get("heads", 1)) * _FLOAT_BYTES
    return activations + _LOGIT_ARRAYS * limits.rows_of(tokens) * facts.vocab * _FLOAT_BYTES
