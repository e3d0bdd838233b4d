"""Fills a model's parameters from a checkpoint, by the model's table of names and patterns."""

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint

IGNORABLE = ("rope_freqs.weight", "rotary_emb.inv_freq", "attention.masked_bias", "attn.masked_bias", "embeddings.position_ids")
"""Endings of tensors that old savers wrote along: constants that follow from the config."""

_BLOCK_BYTES = 4 * 2**20
"""Rows are converted in blocks of this size as stored, so that converting takes hardly any memory beside the result."""

_ALIGNMENT_BYTES = 64
"""At this alignment jax can take a numpy array on CPU as it is, without a copy."""

_MOST_FAULTS = 20

_STACKED: Mapping[str, str] = MappingProxyType({"{layer}": "layers", "{expert}": "experts"})
"""Words in the names of tables -> axes of parameters, outermost first."""


@runtime_checkable
class ShapeDtype(Protocol):
    """Shape and type of a parameter; `jax.ShapeDtypeStruct` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


type TakeTensor = Callable[[str, tuple[int, ...]], int]
"""Given a tensor's name and its place in a stacked parameter, takes it over and returns the bytes that it became."""


class _Copy(NamedTuple):
    """One tensor of the checkpoint and where it goes: a whole parameter, one layer of a stacked one, or one expert of a layer."""

    name: str
    path: str
    place: tuple[int, ...]
    pattern: str


def fill(
    checkpoint: Checkpoint,
    weights_table: Mapping[str, tuple[str, str]],
    expected: Mapping[str, ShapeDtype],
    axis_sizes: Mapping[str, int],
    *,
    may_be_unread: Collection[str] = (),
    taken: Mapping[str, TakeTensor] = MappingProxyType({}),
    num_threads: int = 1,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """Reads every expected parameter exactly once.

    Args:
        weights_table: checkpoint name -> (parameter path, einops pattern "tensor -> parameter"). A name with `{layer}` stands for
            `axis_sizes["layers"]` tensors, stacked on a leading axis of the parameter, one with `{expert}` for `axis_sizes["experts"]`
            on the next. Entries whose parameter is not expected are those of other variants; their tensors are refused like any other
            unknown one.
        expected: parameter path -> shape and type to keep it in.
        axis_sizes: sizes of the axes in the patterns, "layers" and "experts".
        may_be_unread: parameter paths whose tensors may be there although the parameter is not expected.
        taken: parameter path -> who takes its tensors instead, from several threads; such parameters are left out of the result.
        num_threads: tensors that are converted at the same time; numpy lets go of the interpreter lock meanwhile.
        on_bytes: told the size of each tensor once it is converted; one at a time.

    Returns:
        Parameter path -> array of 64-byte aligned memory. Tensor by tensor and row by row, so that memory in use is the result and a
        few megabytes for each thread.

    Raises:
        CheckpointError: tensors that are missing, unknown or of another shape, all of them by name, before anything is allocated; or
            values that the kept type cannot hold.
        ValueError: the table does not match the parameters (a fault of the model file, not of the checkpoint).
    """
    copies, unread = _bind(weights_table, expected, axis_sizes, may_be_unread)
    _refuse_faults(checkpoint, copies, unread, axis_sizes)
    filled = {path: aligned_empty(like.shape, np.dtype(like.dtype)) for path, like in expected.items() if path not in taken}

    def make(copy: _Copy) -> None:
        if copy.path in taken:
            num_bytes = taken[copy.path](copy.name, copy.place)
        else:
            _copy_tensor(checkpoint, copy, filled[copy.path][copy.place], axis_sizes)
            num_bytes = filled[copy.path][copy.place].nbytes
        checkpoint.release(copy.name)
        with telling:
            on_bytes(num_bytes)

    telling = threading.Lock()
    with concurrent.futures.ThreadPoolExecutor(num_threads, "jaxpaged-load") as pool:
        try:
            for _ in pool.map(make, copies):
                pass
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return filled


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory that is not filled in, C-contiguous and aligned to 64 bytes."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _bind(
    weights_table: Mapping[str, tuple[str, str]],
    expected: Mapping[str, ShapeDtype],
    axis_sizes: Mapping[str, int],
    may_be_unread: Collection[str],
) -> tuple[list[_Copy], set[str]]:
    """The copies to make, and the names of tensors that may be there unread. Raises ValueError when table and parameters disagree."""
    copies: list[_Copy] = []
    unread: set[str] = set()
    unfilled = set(expected)
    for name_pattern, (path, pattern) in weights_table.items():
        stacked = [axis for word, axis in _STACKED.items() if word in name_pattern]
        stack_shape = tuple(axis_sizes[axis] for axis in stacked)
        bound = [_Copy(_named(name_pattern, index), path, index, pattern) for index in np.ndindex(stack_shape)]
        if path not in expected:
            unread |= {copy.name for copy in bound if path in may_be_unread}
            continue
        if path not in unfilled:
            raise ValueError(f"the weights table fills {path} twice")
        unfilled.remove(path)
        shape = stack_shape + _side_shape(pattern, 1, axis_sizes)
        if tuple(expected[path].shape) != shape:
            raise ValueError(f"the weights table gives {path} the shape {shape}, the model {tuple(expected[path].shape)}")
        copies += bound
    if unfilled:
        raise ValueError(f"the weights table does not fill {', '.join(sorted(unfilled))}")
    return copies, unread


def _named(name_pattern: str, index: tuple[int, ...]) -> str:
    numbers = iter(index)
    for word in _STACKED:
        if word in name_pattern:
            name_pattern = name_pattern.replace(word, str(next(numbers)))
    return name_pattern


def _refuse_faults(checkpoint: Checkpoint, copies: list[_Copy], unread: set[str], axis_sizes: Mapping[str, int]) -> None:
    due = {copy.name: _side_shape(copy.pattern, 0, axis_sizes) for copy in copies}
    found = checkpoint.names()
    faults = [f"{name} is missing{_hint(checkpoint, name)}" for name in due if name not in found]
    faults += [
        f"{name} has shape {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, shape in due.items()
        if name in found and checkpoint.shape(name) != shape
    ]
    faults += [f"{name} is not part of this model" for name in sorted(found - due.keys() - unread) if not name.endswith(IGNORABLE)]
    if faults:
        raise CheckpointError(f"the weights do not fit the config: {_listed(faults)}")


def _hint(checkpoint: Checkpoint, name: str) -> str:
    if name == "lm_head.weight" and not checkpoint.hf_config.get("tie_word_embeddings"):
        return " (the config does not say tie_word_embeddings, so the model needs a head of its own)"
    return ""


def _copy_tensor(checkpoint: Checkpoint, copy: _Copy, target: np.ndarray, axis_sizes: Mapping[str, int]) -> None:
    """Writes one tensor into `target`, in blocks of rows where the memory of `target` can be looked at in the tensor's own layout."""
    import einops

    source, kept = (side.strip() for side in copy.pattern.split("->"))
    axes = {axis: size for axis, size in axis_sizes.items() if axis in copy.pattern.replace("(", " ").replace(")", " ").split()}
    num_rows, *row_shape = checkpoint.shape(copy.name)
    as_stored = einops.rearrange(target, f"{kept} -> {source}", **axes)
    try:
        # A value too large for float16 would become an infinity without a word.
        with np.errstate(over="raise", invalid="ignore"):
            if np.shares_memory(as_stored, target):
                rows_at_a_time = max(1, _BLOCK_BYTES // (prod(row_shape) * checkpoint.dtype(copy.name).itemsize))
                for first in range(0, num_rows, rows_at_a_time):
                    block = slice(first, min(first + rows_at_a_time, num_rows))
                    as_stored[block] = checkpoint.read_rows(copy.name, block.start, block.stop)
            else:
                target[...] = einops.rearrange(checkpoint.read(copy.name), copy.pattern, **axes)
    except FloatingPointError:
        raise CheckpointError(f"{copy.name} holds values beyond the range of {target.dtype}: choose another dtype") from None


def _side_shape(pattern: str, side: int, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape that one side of an einops pattern stands for: "(heads head_dim) embed" -> (heads * head_dim, embed)."""
    shape: list[int] = []
    group: list[int] | None = None
    for word in pattern.split("->")[side].replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            shape.append(prod(group or ()))
            group = None
        else:
            size = 1 if word == "1" else axis_sizes[word]
            (shape if group is None else group).append(size)
    return tuple(shape)


def _listed(faults: Iterable[str]) -> str:
    listed = list(faults)
    rest = len(listed) - _MOST_FAULTS
    return "; ".join(listed[:_MOST_FAULTS]) + (f"; and {rest} more" if rest > 0 else "")
