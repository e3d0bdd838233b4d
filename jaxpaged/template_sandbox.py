"""Where chat templates run: Jinja's immutable sandbox, with what transformers offers them, and with bounds on memory.

No value grows past `MAX_CHARS` characters or items: each operation that can make a long value out of short ones is looked at before
it is done. What only takes time is stopped from outside, see `time_limit`.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 16_000_000
"""Characters of a text, or items of a list, that a template may make; the rendered conversation included."""
MAX_INT_BITS = 4096
MAX_INDENT = 256
MAX_FORMAT_WIDTH = 99_999


_FIELD = re.compile(r"%(?:\([^)]*\))?([-#0 +\d.*]*)|\{[^{}:]*:([^{}]*)")
"""Flags, width and precision of a field: of `%5.2f` and of `{:>4}`. Digits of the text around it are nobody's width."""
_TAKES_WIDTH = re.compile(r"%(?:\([^)]*\))?[-#0 +\d.]*\*|\{[^{}]*:[^{}]*\{")


class RefusalError(TemplateError):
    """The template called `raise_exception`."""


class TooLargeError(TemplateError):
    """The template makes a value that is too large."""


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TooLargeError(f"it makes a value of {size} characters or items, and at most {MAX_CHARS} are allowed")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _raise_exception(message: Any) -> None:
    raise RefusalError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int):
        _check_indent(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_indent(width: Any) -> None:
    if _size(width) > MAX_INDENT or (isinstance(width, int) and width > MAX_INDENT):
        raise TooLargeError(f"an indent is at most {MAX_INDENT} wide")


class _TemplateDict:
    """`dict(...)` for templates, without the attributes of the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace(...)` for templates: names beginning with an underscore lead to Python's internals and are refused."""

    def __init__(*args: Any, **attributes: Any) -> None:
        # Jinja's own signature, so that a template may call an attribute `self`.
        self, *rest = args
        items = dict(*rest, **attributes)
        for name in items:
            _refuse_internal(name)
        Namespace.__init__(self, items)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        Namespace.__setitem__(self, name, value)


def _refuse_internal(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template must not use the name {name!r}")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model was trained to write; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Code(CodeGenerator):
    """Sends `a ~ b` through the environment, as the sandbox does with other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")))")


def _concat(parts: Iterable[str]) -> str:
    """Joins pieces of text, unless they get too long together."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        _check_size(size)
        kept.append(part)
    return "".join(kept)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _tojson
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _guarded(self.filters[name], check)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators by which a value can outgrow its parts."""
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*" and (_size(left) or _size(right)):
            count = right if isinstance(right, int) else left if isinstance(left, int) else 0
            _check_size((_size(left) + _size(right)) * count)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise TooLargeError(f"it makes a number of more than {MAX_INT_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of texts that can make long ones."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(owner, str) and name in _METHOD_CHECKS:
            _METHOD_CHECKS[name](owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As the sandbox does, with widths that are bounded."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            is_mapping = value.__name__ == "format_map" and args and isinstance(args[0], Mapping)
            _check_format(value.__self__, (*(args[0].values() if is_mapping else args), *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _guarded(filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    takes_environment = hasattr(filter_, "jinja_pass_arg")

    @functools.wraps(filter_)  # which also keeps what the filter wants to be given first
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args[1 if takes_environment else 0 :], **kwargs)
        return filter_(*args, **kwargs)

    return checked


def _check_width(value: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        _check_size(width)


def _check_indent_filter(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_indent(width)
    _check_size(_size(value) + str(value).count("\n") * (width if isinstance(width, int) else _size(width)))


def _check_replace(value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(value), str(old), str(new)
    _check_size(len(text) + text.count(old) * len(new))


def _check_join(separator: Any, values: Any = (), *_: Any, **__: Any) -> None:
    if isinstance(values, list | tuple):
        _check_size(sum(len(str(value)) for value in values) + len(values) * _size(separator))


def _check_join_filter(values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    _check_join(str(d), values)


def _check_expandtabs(text: str, tabsize: Any = 8, *_: Any, **__: Any) -> None:
    if isinstance(tabsize, int):
        _check_size(len(text) + text.count("\t") * max(tabsize, 0))


def _check_translate(text: str, table: Any = None, *_: Any, **__: Any) -> None:
    longest = max((_size(value) for value in table.values()), default=0) if isinstance(table, Mapping) else 0
    _check_size(len(text) * max(longest, 1))


def _check_format_filter(value: Any, *args: Any, **kwargs: Any) -> None:
    _check_format(str(value), (*args, *kwargs.values()))


def _check_format(format_: str, values: Iterable[Any]) -> None:
    """Widths and precisions are written in the format's fields, or taken from a value (`*`, `{:{}}`)."""
    values = tuple(values)
    widths = [int(number) for groups in _FIELD.findall(format_) for field in groups for number in re.findall(r"\d+", field)]
    if _TAKES_WIDTH.search(format_):
        widths += [abs(value) for value in values if isinstance(value, int)]
    if any(width > MAX_FORMAT_WIDTH for width in widths):
        raise TooLargeError(f"a format's width is at most {MAX_FORMAT_WIDTH}")
    longest = max((len(str(value)) for value in values if isinstance(value, str | list | tuple | dict)), default=0)
    _check_size(len(format_) + (format_.count("%") + format_.count("{")) * longest + sum(widths))


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_width,
    "center": _check_width,
    "format": _check_format_filter,
    "indent": _check_indent_filter,
    "join": _check_join_filter,
    "replace": _check_replace,
    "slice": _check_width,
}
_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "expandtabs": _check_expandtabs,
    "join": _check_join,
    "ljust": _check_width,
    "replace": _check_replace,
    "rjust": _check_width,
    "translate": _check_translate,
    "zfill": _check_width,
}
