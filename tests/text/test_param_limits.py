"""The table of limits of sampling parameters: each at its edge and one over it, the sentences, and the documentation."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.param_limits import LIMITS, Limit, range_of
from jaxpaged.request import SamplingParams

DOCUMENT = Path(__file__).parents[2] / "docs" / "sampling.md"
BY_FIELD = {limit.field: limit for limit in LIMITS}
WORDS = {
    "integer": "integer",
    "number": "number",
    "flag": "true or false",
    "texts": "list of texts",
    "ids": "list of ids",
    "biases": "object of ids and numbers",
}


def one(limit: Limit, value: float, count: int = 1) -> Any:
    """A value of the field whose items are at `value`, with `count` of them."""
    match limit.kind:
        case "integer":
            return int(value)
        case "texts":
            return ["x" * int(value)] * count
        case "ids":
            return [int(value)] * count
        case "biases":
            return dict.fromkeys(range(count), value)
    return value


def make(limit: Limit, value: Any) -> SamplingParams:
    # What makes the ends of these two ranges possible.
    partners: dict[str, dict[str, Any]] = {"min_tokens": {"max_tokens": None}, "max_tokens": {"prompt_logprobs": 0}}
    fields = partners.get(limit.field, {})
    return SamplingParams(**{**fields, limit.field: value})


def beyond(limit: Limit, bound: float, direction: int) -> float:
    if limit.kind in ("number", "biases"):
        return math.nextafter(bound, direction * math.inf)
    return bound + direction


RANGED = [limit for limit in LIMITS if limit.kind != "flag"]


@pytest.mark.parametrize("limit", RANGED, ids=lambda limit: limit.field)
def test_each_limit_at_its_edge_and_one_over(limit: Limit) -> None:
    lowest = beyond(limit, limit.low, 1) if limit.is_open else limit.low
    for value in (lowest, limit.high):
        assert getattr(make(limit, one(limit, value)), limit.field) == one(limit, value)
    refused = [beyond(limit, limit.low, -1), beyond(limit, limit.high, 1), *([limit.low] if limit.is_open else [])]
    for value in refused if limit.kind != "texts" else [0, limit.high + 1]:
        with pytest.raises(InvalidRequestError) as caught:
            make(limit, one(limit, value))
        assert caught.value.param == limit.field
        assert limit.field in caught.value.message
        shown = value if limit.kind in ("number", "biases") else int(value)
        assert f"got {shown}" in caught.value.message
        assert range_of(limit) in caught.value.message or limit.kind == "texts"


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.most], ids=lambda limit: limit.field)
def test_each_number_of_items_at_its_edge_and_one_over(limit: Limit) -> None:
    middle = 1.0 if limit.kind == "biases" else max(limit.low, 1)
    make(limit, one(limit, middle, limit.most))
    with pytest.raises(InvalidRequestError, match=f"{limit.field} takes at most {limit.most} .*, got {limit.most + 1}"):
        make(limit, one(limit, middle, limit.most + 1))
    if limit.least:
        with pytest.raises(InvalidRequestError, match=f"{limit.field} must name at least one"):
            make(limit, one(limit, middle, 0))


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.field)
def test_null_is_unset_or_refused_and_other_types_are_refused(limit: Limit) -> None:
    if limit.is_optional:
        assert getattr(make(limit, None), limit.field) is None
    else:
        with pytest.raises(InvalidRequestError, match=f"{limit.field} must be .*, got None"):
            make(limit, None)
    wrong: list[Any] = [b"7", object(), [None], [[7]], {"a": [7]}, *([] if limit.field == "stop" else ["seven"])]
    wrong += [] if limit.kind == "flag" else [True]
    wrong += [7, math.nan] if limit.kind in ("flag", "texts", "ids", "biases") else [math.nan, math.inf, -math.inf]
    for value in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            make(limit, value)
        assert caught.value.param == limit.field
        assert limit.field in caught.value.message
        assert len(caught.value.message) < 250


def test_every_field_has_a_limit_or_a_rule_of_its_own() -> None:
    own = {"output_kind", "best_of", "structured_outputs"}
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} == {*BY_FIELD, *own}
    for field, value in (("output_kind", 1), ("best_of", 2), ("structured_outputs", {"json": {}})):
        with pytest.raises(InvalidRequestError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


def test_numpys_numbers_are_taken_as_pythons() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), min_tokens=np.int32(1), logprobs=np.uint8(2), n=np.int16(2))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=3, min_tokens=1, logprobs=2, n=2)
    assert {type(getattr(params, limit.field)) for limit in LIMITS} <= {int, float, bool, type(None)}
    for field, value in (
        ("top_k", np.float32(1.5)),
        ("top_k", np.bool_(True)),
        ("temperature", np.bool_(True)),
        ("min_p", np.float32("nan")),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            SamplingParams(**{field: value})
    assert params.clone() == params


@pytest.mark.parametrize("key", ["9" * 5000, "-1", "+1", "1.0", "\u0663", "", 1.0, None, True, 2**31])
def test_keys_that_are_no_ids_are_refused(key: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias has token ids for keys"):
        SamplingParams(logit_bias={key: 1.0})


def row_of(limit: Limit) -> str:
    """The line of the documentation."""
    allowed = range_of(limit)
    if limit.kind == "texts":
        allowed = f"{limit.least} to {limit.most}, of {int(limit.low)} to {int(limit.high)} characters each"
    elif limit.most:
        allowed = f"{limit.least} to {limit.most}, {allowed}"
    default = msgspec.json.encode(getattr(SamplingParams(), limit.field)).decode()
    return f"| `{limit.field}` | {WORDS[limit.kind]} | {allowed} | {default} | {limit.meaning} |"


def test_the_document_shows_the_table() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    shown = [line for line in lines if line.startswith("| `") and line.split("`")[1] in BY_FIELD]
    assert shown == [row_of(limit) for limit in LIMITS]
