"""Which implementation runs, what is said of the others, and what cannot be had."""

from typing import Any, get_args, get_type_hints

import pytest

from jaxpaged.config import KernelsConfig
from pallas_kernels import dense_matmul, gated_product, grouped_matmul, kv_write, paged_attention, quantized_matmul, rms_norm
from pallas_kernels.dispatch import Choice, Implementation, Op, UnsupportedKernelError, choose, selecting

pytestmark = [pytest.mark.jax]

OPS = (
    paged_attention.OP,
    kv_write.OP,
    quantized_matmul.OP,
    dense_matmul.OP,
    rms_norm.OP,
    gated_product.OP,
    grouped_matmul.OP,
)


def implementation(name: str, *reasons: str) -> Implementation:
    return Implementation(name, lambda: name, lambda limit: [reason for reason in reasons if limit > 1])


OP = Op(
    "halve",
    {one.name: one for one in (implementation("reference"), implementation("fast", "too large", "too odd"), implementation("slow"))},
    {"default": ("fast", "slow")},
)


def test_the_first_that_does_not_refuse_is_taken_and_the_others_say_why() -> None:
    with selecting({}) as choices:
        assert choose(OP, None, (1,), {}).name == "fast"
        assert choose(OP, None, (2,), {}).name == "slow"
        assert choose(OP, "slow", (1,), {}).name == "slow"
    assert choices == {
        Choice("halve", "fast", ("slow: fast goes first",)),
        Choice("halve", "slow", ("fast: too large; too odd",)),
        Choice("halve", "slow", ("fast: slow was asked for",)),
    }


def test_what_is_asked_for_runs_or_raises_and_only_inside() -> None:
    with selecting({"halve": "fast", "another": "reference"}):
        assert choose(OP, None, (1,), {}).name == "fast"
        assert choose(OP, "reference", (1,), {}).name == "reference"  # the caller's own word goes first
        with pytest.raises(
            UnsupportedKernelError, match="^no implementation of halve takes these operands: fast: too large; too odd$"
        ) as info:
            choose(OP, None, (2,), {})
    assert info.value.op == "halve"
    assert choose(OP, None, (2,), {}).name == "slow"


def test_one_that_is_tried_by_nobody_says_so() -> None:
    unasked = OP._replace(preference={"default": ("slow",)})
    with selecting({}) as choices:
        choose(unasked, None, (1,), {})
    assert [choice.refused for choice in choices] == [("fast: it runs when asked for by name",)]


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS])
def test_the_options_name_the_implementations(op: Op) -> None:
    hints: dict[str, Any] = get_type_hints(KernelsConfig)
    assert set(hints) == {op.name for op in OPS}
    names, nothing = get_args(hints[op.name])
    assert nothing is type(None)
    assert set(get_args(names)) == set(op.implementations)
