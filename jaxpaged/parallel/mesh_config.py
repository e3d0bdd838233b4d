"""The mesh that a YAML file and the options ask for, and whether a model and the devices allow it.

Three axes: `data` (copies of the model), `tensor` (devices that share every layer) and `expert` (devices that share the experts of a
mixture). The table says which axis of the model lies on which of them; what is left out lies whole on every device.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxpaged.config import ParallelConfig
from jaxpaged.counts import counted
from jaxpaged.errors import ConfigError
from jaxpaged.options import nearest, read_yaml

AXES = ("data", "tensor", "expert")
TABLE: Mapping[str, str] = MappingProxyType(
    {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ffw": "tensor", "experts": "expert"}
)
"""Axis of the model -> the mesh axis that it may lie on."""

MOST_DEVICES = 4096


class MeshShape(NamedTuple):
    """How many devices each axis of the mesh has, and what lies on it."""

    data: int = 1
    tensor: int = 1
    expert: int = 1
    table: Mapping[str, str] = TABLE

    @property
    def devices_per_replica(self) -> int:
        """Devices that share one copy of the model."""
        return self.tensor * self.expert

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.data * self.devices_per_replica


class ModelCounts(NamedTuple):
    """What of a model is dealt out whole. `experts`: 1 where there is no mixture."""

    heads: int
    experts: int


def read_mesh(parallel: ParallelConfig) -> MeshShape:
    """What the options and the file that they name ask for.

    Raises:
        ConfigError: the file cannot be read, says what no mesh has, or contradicts the options.
    """
    if parallel.mesh is None:
        return MeshShape(tensor=parallel.tensor_parallel_size)
    path = Path(parallel.mesh)
    tree = read_yaml(path)
    _refuse_unknown(tree, ("axes", "table"), path)
    axes, table = (_mapping(tree, name, path) for name in ("axes", "table"))
    _refuse_unknown(axes, AXES, path)
    _refuse_unknown(table, TABLE, path)
    for name, count in axes.items():
        if type(count) is not int or not 1 <= count <= MOST_DEVICES:
            raise ConfigError(f"{path}: axes.{name} must be an integer from 1 to {MOST_DEVICES}, not {count!r:.60}", param="parallel.mesh")
    for word, axis in table.items():
        if axis != TABLE[word]:
            raise ConfigError(
                f"{path}: table.{word} is {axis!r:.60}, and {word} may lie on {TABLE[word]} only; leave it out to have it whole everywhere",
                param="parallel.mesh",
            )
    if ("heads" in table) != ("kv_heads" in table):
        raise ConfigError(f"{path}: the table must have both heads and kv_heads, or neither", param="parallel.mesh")
    mesh = MeshShape(**axes, table=table if "table" in tree else TABLE)
    wanted = parallel.tensor_parallel_size
    if wanted not in (1, mesh.tensor):
        raise ConfigError(f"tensor_parallel_size {wanted} contradicts {path}, which says tensor {mesh.tensor}", param="parallel.mesh")
    return mesh


def check_mesh(mesh: MeshShape, model: ModelCounts, num_devices: int) -> None:
    """Refuses counts that the model or the machine does not allow; nothing of the model's weights is needed for that.

    Raises:
        ConfigError: with the values that are allowed.
    """
    dealt: dict[str, tuple[int, str]] = {"expert": (model.experts, counted(model.experts, "expert"))}
    if "heads" in mesh.table:
        dealt["tensor"] = (model.heads, counted(model.heads, "head"))
    if mesh.expert > 1 == model.experts:
        raise ConfigError(
            f"the mesh axis expert is {mesh.expert}, and the model is no mixture of experts; allowed: 1", param=_param("expert")
        )
    for axis, (number, what) in dealt.items():
        count = getattr(mesh, axis)
        if number % count:
            allowed = [size for size in range(1, number + 1) if number % size == 0]
            raise ConfigError(f"{_named(axis)} {count} does not divide the model's {what}; allowed: {_listed(allowed)}", param=_param(axis))
    if mesh.num_devices > num_devices:
        axis = max(AXES, key=lambda axis: getattr(mesh, axis))
        others = mesh.num_devices // getattr(mesh, axis)
        allowed = [size for size in range(1, num_devices // others + 1) if axis not in dealt or dealt[axis][0] % size == 0]
        used = f"; allowed for {_named(axis)}: {_listed(allowed)}" if allowed else "; the other axes alone need more"
        raise ConfigError(
            f"{_described(mesh)} needs {counted(mesh.num_devices, 'device')} and JAX has {counted(num_devices, 'device')}{used}",
            param=_param(axis),
        )


def _described(mesh: MeshShape) -> str:
    parts = [f"{_named(axis)} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1]
    return " with ".join(parts)


def _named(axis: str) -> str:
    return "tensor_parallel_size" if axis == "tensor" else f"the mesh axis {axis}"


def _param(axis: str) -> str:
    return "parallel.tensor_parallel_size" if axis == "tensor" else "parallel.mesh"


def _listed(allowed: list[int]) -> str:
    return ", ".join(map(str, allowed))


def _mapping(tree: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = tree.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: {name} must be a mapping, not {value!r:.60}", param="parallel.mesh")
    return {str(key): entry for key, entry in value.items()}


def _refuse_unknown(found: Mapping[str, Any], known: Any, path: Path) -> None:
    for name in found:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"{path}: unknown key {name!r:.60}; " + (f"the nearest is {near}" if near else f"known: {', '.join(known)}"),
                param="parallel.mesh",
            )
