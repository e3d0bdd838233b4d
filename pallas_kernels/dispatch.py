"""Choosing an implementation: the first of the platform's list that does not refuse, or the one asked for by name."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from pallas_kernels.gpu_target import platform

REFERENCE = "reference"
"""Written to be believed: it runs when asked for by name only, and nobody asks why it was not taken."""

UNASKED = "it runs when asked for by name"


class UnsupportedKernelError(ValueError):
    """No implementation takes these operands; the message gathers what each refused and why.

    Attributes:
        op: the op's name.
    """

    def __init__(self, op: str, message: str) -> None:
        super().__init__(message)
        self.op = op


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


class Choice(NamedTuple):
    """Which implementation of an op was taken.

    Attributes:
        refused: a sentence for each of the others that begins with its name, the reference apart.
    """

    op: str
    implementation: str
    refused: tuple[str, ...]


class _Selection(NamedTuple):
    """What is asked for while programs are traced, and what was taken."""

    asked: Mapping[str, str]
    taken: set[Choice]


_SELECTION: ContextVar[_Selection | None] = ContextVar("selection", default=None)


@contextlib.contextmanager
def selecting(asked: Mapping[str, str]) -> Iterator[set[Choice]]:
    """While inside, on this thread, ops that are called without an implementation take those that are asked for.

    Args:
        asked: name of an op -> name of the implementation that it runs with, or raises. The others take what is best for the device.

    Yields:
        What was taken, filled as ops are called.
    """
    selection = _Selection(asked, set())
    token = _SELECTION.set(selection)
    try:
        yield selection.taken
    finally:
        _SELECTION.reset(token)


def choose(op: Op, implementation: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Implementation:
    """Returns the implementation to run. Raises UnsupportedKernelError when none, or not the one asked for, takes the operands."""
    selection = _SELECTION.get()
    if implementation is None and selection is not None:
        implementation = selection.asked.get(op.name)
    if implementation is not None and implementation not in op.implementations:
        there_are = ", ".join(op.implementations)
        raise UnsupportedKernelError(op.name, f"{op.name} has no implementation {implementation!r}; there are {there_are}")
    refused: dict[str, str] = {}
    for name in (implementation,) if implementation else _preferred(op):
        refused[name] = "; ".join(op.implementations[name].refusals(*args, **kwargs))
        if not refused[name]:
            if selection is not None:
                not_taken = _not_taken(op, name, implementation is not None, args, kwargs)
                selection.taken.add(Choice(op.name, name, tuple(not_taken)))
            return op.implementations[name]
    reasons = " | ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise UnsupportedKernelError(op.name, f"no implementation of {op.name} takes these operands: {reasons}")


def _preferred(op: Op) -> Sequence[str]:
    return op.preference.get(platform(), op.preference["default"])


def _not_taken(op: Op, taken: str, is_asked: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Why each of the other implementations does not run."""
    for name, other in op.implementations.items():
        if name not in (taken, REFERENCE):
            reasons = other.refusals(*args, **kwargs)
            able = f"{taken} was asked for" if is_asked else f"{taken} goes first" if name in _preferred(op) else UNASKED
            yield f"{name}: {'; '.join(reasons) or able}"
