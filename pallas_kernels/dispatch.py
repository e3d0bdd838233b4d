"""Choosing an implementation: the first of the platform's list that does not refuse, or the one asked for by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels.gpu_target import platform


class UnsupportedKernelError(ValueError):
    """No implementation takes these operands; the message gathers what each refused and why."""


class Implementation(NamedTuple):
    """One way to run an op. `refusals(*args, **kwargs)` returns a sentence for each thing it cannot do."""

    name: str
    run: Callable[..., Any]
    refusals: Callable[..., Sequence[str]]


class Op(NamedTuple):
    """An op's implementations by name, and the order in which each platform tries them ("default" for the others)."""

    name: str
    implementations: Mapping[str, Implementation]
    preference: Mapping[str, Sequence[str]]


def choose(op: Op, implementation: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Implementation:
    """Returns the implementation to run. Raises UnsupportedKernelError when none, or not the one asked for, takes the operands."""
    if implementation is not None and implementation not in op.implementations:
        raise UnsupportedKernelError(f"{op.name} has no implementation {implementation!r}; there are {', '.join(op.implementations)}")
    names = (implementation,) if implementation else op.preference.get(platform(), op.preference["default"])
    refused = []
    for name in names:
        candidate = op.implementations[name]
        reasons = candidate.refusals(*args, **kwargs)
        if not reasons:
            return candidate
        refused.append(f"{name}: {'; '.join(reasons)}")
    raise UnsupportedKernelError(f"no implementation of {op.name} takes these operands: {' | '.join(refused)}")
