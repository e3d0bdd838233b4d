"""The stages of a step: names that the operations of a compiled program carry, and by which a trace is summed up.

A stage inside another makes a path: `attention/kv_write`. They are words in the metadata of operations and cost nothing at run time.
"""

from contextlib import AbstractContextManager, ContextDecorator
from typing import TYPE_CHECKING, Literal, cast, get_args

type Stage = Literal[
    "unpack",
    "embed",
    "rope",
    "norm",
    "attention",
    "qkv",
    "kv_write",
    "attend",
    "out",
    "mlp",
    "head",
    "shape_logits",
    "sample",
    "logprobs",
    "pool",
    "slots",
]

STAGES: frozenset[str] = frozenset(get_args(Stage.__value__))

if TYPE_CHECKING:

    class _Scope(AbstractContextManager[None], ContextDecorator): ...


def stage(name: Stage) -> "_Scope":
    """Names what is traced inside: a context, or a decorator of a function of arrays."""
    import jax  # late: what reads traces needs the words alone

    return cast("_Scope", jax.named_scope(name))


def stage_of(op_name: str) -> str:
    """The path of stages in an operation's name, such as `jit(step)/while/body/attention/kv_write/scatter`; empty: there is none."""
    path: list[str] = []
    for word in op_name.split("/"):
        if word in STAGES and word not in path:
            path.append(word)
    return "/".join(path)
