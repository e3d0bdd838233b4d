"""Kinds of values in a config.json, told apart."""

from typing import TypeGuard

MAX_COUNT = 2**31 - 1


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is an integer from 1 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number, not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number above 0."""
    return is_number(value) and value > 0


def kind_of(value: object) -> str:
    """A word for a message: "a list", "null", "a number", ..."""
    words = {list: "a list", dict: "an object", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
