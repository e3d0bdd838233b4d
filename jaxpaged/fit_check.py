"""Refuses a model that does not fit before its weights are read, and says which changes would make it fit, with their numbers."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import msgspec

from jaxpaged.config import CacheConfig, Config, ModelConfig
from jaxpaged.counts import counted
from jaxpaged.errors import ConfigError, MemoryBudgetError
from jaxpaged.host_limits import host_memory
from jaxpaged.kv_cache import CPU_POOL_BYTES, device_memory
from jaxpaged.memory_plan import MemoryPlan, Room, plan_memory
from jaxpaged.model_loader import DTYPES, ModelDescription
from jaxpaged.options import validate
from jaxpaged.parallel.mesh_config import MeshShape, ModelCounts, check_mesh, read_mesh
from jaxpaged.parameter_sizes import ParameterSize
from jaxpaged.settings import decide_limits

NUM_CHANGES = 3
MOST_DEVICES = 64
LEAST_MODEL_LEN = 128
"""A shorter text is of no use to anybody, and never proposed."""
_HIGHEST_GPU_SHARE = 0.97
_FP8_CACHE = "fp8_e4m3"


class Change(NamedTuple):
    """What to change, in words of the command line, and what comes of it."""

    words: str
    plan: MemoryPlan

    def __str__(self) -> str:
        requests = counted(self.plan.full_requests, "request")
        return f"{self.words} ({requests} of {self.plan.max_model_len:,} tokens, {self.plan.tokens:,} tokens in all)"


class _Wish(NamedTuple):
    """One setting to plan with."""

    config: Config
    mesh: MeshShape


_Step = Callable[[_Wish], tuple[str, _Wish] | None]
"""Changes one thing, and names it; None where there is nothing to change."""


def room_here() -> Room | None:
    """Memory of this machine's first device, or of the machine itself where JAX computes on the CPU; None where nobody tells."""
    device = device_memory(jax.local_devices()[:1])
    if device is not None:
        return Room(device.limit_bytes, device.in_use_bytes)
    memory = host_memory()
    return None if memory is None else Room(memory, takes_all=False)


class FitCheck:
    """What fits of one model."""

    def __init__(self, config: Config, description: ModelDescription, room: Room) -> None:
        """Nothing is worked out yet.

        Args:
            config: the whole tree.
            description: the model.
            room: memory of each device; where devices are one machine's processors, of all together.
        """
        self._config, self._description, self._room = config, description, room

    def plan(self, mesh: MeshShape | None = None) -> MemoryPlan:
        """The plan as things are; `mesh` None: as the options say.

        Raises:
            ConfigError: limits contradict each other or the model, or the mesh cannot be read, or not share the model.
        """
        mesh = read_mesh(self._config.parallel) if mesh is None else mesh
        check_mesh(mesh, self._counts, mesh.num_devices)
        return self._plan_of(_Wish(self._config, mesh))

    def require(self, mesh: MeshShape | None = None) -> MemoryPlan:
        """The plan, if it fits.

        Raises:
            MemoryBudgetError: it does not; the message says what is needed, what is there, and the best changes.
            ConfigError: as `plan`.
        """
        mesh = read_mesh(self._config.parallel) if mesh is None else mesh
        plan = self.plan(mesh)
        if not plan.fits:
            raise MemoryBudgetError(self._refusal(plan, mesh))
        return plan

    def changes(self, mesh: MeshShape) -> list[Change]:
        """Up to three changes with which the model fits, the least painful first; two or three things at once where one is not enough.

        More devices come last, and once: as few as will do.
        """
        found: dict[tuple[_Step, ...], Change] = {}
        steps, num_devices = self._steps(mesh), mesh.devices_per_replica
        for number in range(1, NUM_CHANGES + 1):
            if len(found) == NUM_CHANGES:
                break
            tried = [(chosen, self._try(chosen, mesh)) for chosen in itertools.combinations(steps, number)]
            fitting = [(chosen, change) for chosen, change in tried if change is not None]
            for chosen, change in sorted(fitting, key=lambda pair: (pair[1].plan.num_devices, -pair[1].plan.max_model_len)):
                is_split = change.plan.num_devices > num_devices
                if is_split and any(other.plan.num_devices > num_devices for other in found.values()):
                    continue
                enough = [other.plan.max_model_len for fewer, other in found.items() if set(fewer) <= set(chosen)]
                # More changes than are enough are of use only if texts may be longer with them.
                if len(found) < NUM_CHANGES and all(length < change.plan.max_model_len for length in enough):
                    found[chosen] = change
        return sorted(found.values(), key=lambda change: change.plan.num_devices)

    @property
    def _counts(self) -> ModelCounts:
        return ModelCounts(self._description.facts.heads, self._description.facts.experts)

    def _plan_of(self, wish: _Wish) -> MemoryPlan:
        facts, sizes = self._description.facts, self._description.sizes
        wanted = wish.config.model.dtype
        if wanted != self._config.model.dtype:
            # As if the model had been described with this type.
            name = str(DTYPES[wanted])
            sizes = tuple(_in_dtype(size, facts.dtype_name, name) for size in sizes)
            facts = msgspec.structs.replace(facts, dtype_name=name)
        limits = decide_limits(wish.config, is_gpu=self._room.takes_all, model_max_len=facts.max_positions)
        room = self._room
        if room.takes_all:
            share = wish.config.cache.gpu_memory_utilization / self._config.cache.gpu_memory_utilization
            room = room._replace(limit_bytes=int(room.limit_bytes * share))
        else:
            room = room._replace(limit_bytes=room.limit_bytes // wish.mesh.num_devices)
        return plan_memory(wish.config, facts, sizes, limits, room, wish.mesh)

    def _try(self, steps: tuple[_Step, ...], mesh: MeshShape) -> Change | None:
        wish, words = _Wish(self._config, mesh), list[str]()
        for step in steps:
            changed = step(wish)
            if changed is None:
                return None
            named, wish = changed
            words.append(named)
        try:
            validate(wish.config)
            plan = self._plan_of(wish)
        except ConfigError:
            return None
        return Change(" and ".join(words), plan) if plan.fits else None

    def _steps(self, mesh: MeshShape) -> list[_Step]:
        """Those that change no answer come first; how long texts may be comes last, so that it goes with what was changed before."""
        steps: list[_Step] = [self._more_memory, self._less_pool, self._more_pool]
        # Devices that are one machine's processors share its memory.
        if self._room.takes_all:
            for axis, parts in (("tensor", self._counts.heads), ("expert", self._counts.experts)):
                others = mesh.devices_per_replica // getattr(mesh, axis)
                steps += [
                    partial(self._split, mesh, axis, number)
                    for number in (2**power for power in range(1, MOST_DEVICES.bit_length()))
                    if parts % number == 0 and getattr(mesh, axis) < number <= MOST_DEVICES // others
                ]
        return [*steps, self._fewer_rows, self._in_bfloat16, _fp8_cache, self._shorter]

    def _more_memory(self, wish: _Wish) -> tuple[str, _Wish] | None:
        if not self._room.takes_all or wish.config.cache.gpu_memory_utilization >= _HIGHEST_GPU_SHARE:
            return None
        return f"--gpu-memory-utilization {_HIGHEST_GPU_SHARE}", _with_cache(wish, gpu_memory_utilization=_HIGHEST_GPU_SHARE)

    def _less_pool(self, wish: _Wish) -> tuple[str, _Wish] | None:
        plan = self._plan_of(wish)
        if wish.config.cache.memory is None or not _is_pool_too_large(plan):
            return None
        left = plan.room_bytes - plan.weight_bytes - plan.step_bytes
        unit, size = ("MiB", 2**20) if left >= 2**20 else ("KiB", 2**10)
        return f"--cache.memory {left // size}{unit}", _with_cache(wish, memory=left // size * size)

    def _more_pool(self, wish: _Wish) -> tuple[str, _Wish] | None:
        given = wish.config.cache.memory
        if self._room.takes_all and given is None:
            return None
        plan = self._plan_of(wish)
        if plan.least_bytes <= (CPU_POOL_BYTES if given is None else given):
            return None
        mib = -(-plan.least_bytes // 2**20)
        return f"--cache.memory {mib}MiB", _with_cache(wish, memory=mib * 2**20)

    def _split(self, before: MeshShape, axis: str, number: int, wish: _Wish) -> tuple[str, _Wish] | None:
        if wish.mesh != before:
            return None
        file = self._config.parallel.mesh
        if file is not None:
            words = f"axes.{axis}: {number} in {file}"
        else:
            words = f"--tensor-parallel-size {number}" if axis == "tensor" else f"a mesh file (--parallel.mesh) with axes.expert: {number}"
        mesh = wish.mesh._replace(tensor=number) if axis == "tensor" else wish.mesh._replace(expert=number)
        return words, wish._replace(mesh=mesh)

    def _fewer_rows(self, wish: _Wish) -> tuple[str, _Wish] | None:
        rows = self._plan_of(wish).max_num_seqs
        if rows < 16:
            return None
        scheduler = msgspec.structs.replace(wish.config.scheduler, max_num_seqs=rows // 8)
        return f"--max-num-seqs {rows // 8}", wish._replace(config=msgspec.structs.replace(wish.config, scheduler=scheduler))

    def _in_bfloat16(self, wish: _Wish) -> tuple[str, _Wish] | None:
        if self._description.facts.dtype.itemsize <= DTYPES["bfloat16"].itemsize:
            return None
        return "--dtype bfloat16", _with_model(wish, dtype="bfloat16")

    def _shorter(self, wish: _Wish) -> tuple[str, _Wish] | None:
        if not isinstance(wish.config.model.max_model_len, int):
            return None
        longest = self._plan_of(_with_model(wish, max_model_len="auto")).max_model_len
        if not LEAST_MODEL_LEN <= longest < wish.config.model.max_model_len:
            return None
        words = f"--max-model-len {longest} instead of {wish.config.model.max_model_len}"
        return words, _with_model(wish, max_model_len=longest)

    def _refusal(self, plan: MemoryPlan, mesh: MeshShape) -> str:
        pages = "the pages of one request" if isinstance(self._config.model.max_model_len, int) else "the fewest pages"
        where = "this machine" if not self._room.takes_all else "the device"
        if mesh.num_devices > 1:
            where = "each device" if self._room.takes_all else f"each of {mesh.num_devices} devices of this machine"
        said = (
            f"the model does not fit: {_gib(plan.weight_bytes)} of weights ({plan.dtype_name}), {_gib(plan.step_bytes)} of a step and "
            f"{_gib(plan.least_bytes)} of {pages} ({plan.max_model_len:,} tokens) are {_gib(plan.needed_bytes)}; {where} has "
            f"{_gib(plan.room_bytes)} for it"
        )
        if _is_pool_too_large(plan):
            together = plan.weight_bytes + plan.step_bytes + plan.pool_bytes
            said = (
                f"the page pool does not fit: {_gib(plan.weight_bytes)} of weights ({plan.dtype_name}), {_gib(plan.step_bytes)} of a step "
                f"and {_gib(plan.pool_bytes)} of pages (cache.memory) are {_gib(together)}; {where} has {_gib(plan.room_bytes)} for it"
            )
        elif plan.needed_bytes <= plan.room_bytes and plan.least_bytes > plan.pool_bytes:
            said += f", and the page pool gets {_gib(plan.pool_bytes)}"
        changes = self.changes(mesh)
        if not changes:
            return f"{said}; no option makes it fit: take a smaller model, or devices with {_gib(plan.needed_bytes)} and more"
        return f"{said}; with one of these it fits: {'; '.join(map(str, changes))}"


def _is_pool_too_large(plan: MemoryPlan) -> bool:
    """Whether less of the pool that was asked for would be enough, and would fit."""
    return plan.needed_bytes <= plan.room_bytes < plan.weight_bytes + plan.step_bytes + plan.pool_bytes


def table(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """The plan, row by row: name and value."""
    each = "" if plan.num_devices == 1 else " on each device"
    if plan.num_devices > 1:
        axes = [f"{name} {count}" for name, count in (("tensor", plan.tensor), ("expert", plan.expert)) if count > 1]
        yield "devices", f"{plan.num_devices} ({' x '.join(axes) if len(axes) > 1 else axes[0].split()[0] + ' parallel'})"
    yield "memory", f"{_gib(plan.room_bytes)}{each}"
    yield "weights", f"{_gib(plan.weight_bytes)}{each} ({plan.dtype_name})"
    yield "a step", f"about {_gib(plan.step_bytes)}{each}"
    yield "page pool", f"{_gib(plan.pool_bytes)}{each} ({plan.cache_dtype_name})"
    yield "pages", f"{plan.num_pages:,} of {counted(plan.page_size, 'token')}"
    yield "tokens that fit", f"{plan.tokens:,}"
    yield "requests at full length", f"{plan.full_requests:,} of {plan.max_model_len:,} tokens"
    yield "requests at once", f"{plan.max_num_seqs:,}"


def _fp8_cache(wish: _Wish) -> tuple[str, _Wish] | None:
    if wish.config.cache.dtype == _FP8_CACHE:
        return None
    return f"--cache.dtype {_FP8_CACHE}", _with_cache(wish, dtype=_FP8_CACHE)


def _with_cache(wish: _Wish, **changes: object) -> _Wish:
    cache: CacheConfig = msgspec.structs.replace(wish.config.cache, **changes)
    return wish._replace(config=msgspec.structs.replace(wish.config, cache=cache))


def _with_model(wish: _Wish, **changes: object) -> _Wish:
    model: ModelConfig = msgspec.structs.replace(wish.config.model, **changes)
    return wish._replace(config=msgspec.structs.replace(wish.config, model=model))


def _in_dtype(size: ParameterSize, of_model: str, other: str) -> ParameterSize:
    return msgspec.structs.replace(size, dtype_name=other) if size.dtype_name == of_model else size


def _gib(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"
