"""Where chat templates run: Jinja's immutable sandbox, with what transformers offers them, and with bounds on memory.

Each operation that can make a long value out of short ones, write one out, or keep one for later is looked at before it is done
(`template_sizes`). What only takes time is stopped from outside, see `time_limit`.
"""

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxpaged.template_sizes import (
    FILTER_CHECKS,
    MAX_INT_BITS,
    METHOD_CHECKS,
    TooLargeError,
    check_format,
    check_product,
    check_size,
    check_tojson,
    own_size,
    text_size,
)

MAX_KEPT_BYTES = 128_000_000
"""Of all lists and objects that one rendering makes, about, and of the texts that it puts into them."""
PLACE_BYTES, ITEM_BYTES, PAIR_BYTES, CHAR_BYTES = 8, 40, 120, 2
"""Of an item that was there before, of an item that is new, of an object's key and value, and of a character."""
MAX_CALL_DEPTH = 64
"""Calls of macros within calls; each may hold values of its own."""
NO_BYTES = ((str, "encode"), (int, "to_bytes"))
"""Methods that give bytes, which no template needs and no check here knows."""


class RefusalError(TemplateError):
    """The template called `raise_exception`."""


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
    check_tojson(value, indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
    """Sends `a ~ b` and what is written as a list or an object through the environment, as the sandbox does with other operators."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.text, (")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")))")


def checked[T](value: T) -> T:
    """The value, if it is not too large. Raises TooLargeError."""
    text_size(value)
    return value


def _text(value: Any) -> str:
    return str(checked(value))


def _concat(parts: Iterable[str]) -> str:
    """Joins pieces of text, unless they get too long together."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        check_size(size)
        kept.append(part)
    return "".join(kept)


class _Used(threading.local):
    """What the rendering of this thread has used.

    Attributes:
        depth: calls within calls now.
        num_bytes: of `MAX_KEPT_BYTES`.
    """

    depth = 0
    num_bytes = 0


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code
    concat = staticmethod(_concat)
    text = staticmethod(_text)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=checked)
        self._used = _Used()
        self.filters["tojson"] = _tojson
        for name, check in FILTER_CHECKS.items():
            self.filters[name] = self._guarded(self.filters[name], check)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
        )

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """What one of this environment's templates makes of the variables. Raises whatever its expressions can raise."""
        self._used.depth = self._used.num_bytes = 0
        return template.render(variables)

    def kept[T](self, value: T, item_bytes: int = ITEM_BYTES) -> T:
        """A value that may be kept for later. Raises TooLargeError when there are too many lists and objects already."""
        if isinstance(value, list | tuple | dict):
            self._take(len(value) * (PAIR_BYTES if isinstance(value, dict) else item_bytes))
        return value

    def made[T](self, value: T) -> T:
        """A list or an object that the template wrote, or what it had one made of: its texts are kept with it."""
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        self._take(sum([ITEM_BYTES + CHAR_BYTES * len(part) if isinstance(part, str) else ITEM_BYTES for part in parts]))
        return value

    def _take(self, num_bytes: int) -> None:
        self._used.num_bytes += num_bytes
        if self._used.num_bytes > MAX_KEPT_BYTES:
            raise TooLargeError(f"its lists and objects take more than {MAX_KEPT_BYTES} bytes together")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators by which a value can outgrow its parts."""
        if operator == "+":
            check_size(own_size(left) + own_size(right))
        elif operator == "%":
            if isinstance(left, str):
                check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*" and (own_size(left) or own_size(right)):
            check_product(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise TooLargeError(f"it makes a number of more than {MAX_INT_BITS} bits")
        return self.kept(super().call_binop(context, operator, left, right), PLACE_BYTES)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks at methods of texts that can make long ones, and at how deep macros call each other."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(owner, str) and name in METHOD_CHECKS:
            METHOD_CHECKS[name](owner, *args, **kwargs)
        if isinstance(__obj, _TemplateDict) or __obj is _TemplateNamespace:
            __self.made((*args, *kwargs.values()))
        depth = __self._used.depth
        if depth >= MAX_CALL_DEPTH:
            raise TooLargeError(f"its calls are nested more than {MAX_CALL_DEPTH} deep")
        __self._used.depth = depth + 1
        try:
            return __self.kept(super().call(__context, __obj, *args, **kwargs))
        finally:
            __self._used.depth = depth

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox does, and nothing that gives bytes."""
        return super().is_safe_attribute(obj, attr, value) and not any(isinstance(obj, kind) and attr == name for kind, name in NO_BYTES)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As the sandbox does, with widths that are bounded."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def looked_at(*args: Any, **kwargs: Any) -> str:
            is_mapping = value.__name__ == "format_map" and args and isinstance(args[0], Mapping)
            check_format(value.__self__, (*(args[0].values() if is_mapping else args), *kwargs.values()))
            return wrapped(*args, **kwargs)

        return looked_at

    def _guarded(self, filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        takes_environment = hasattr(filter_, "jinja_pass_arg")

        @functools.wraps(filter_)  # which also keeps what the filter wants to be given first
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            check(*args[1 if takes_environment else 0 :], **kwargs)
            return self.kept(filter_(*args, **kwargs))

        return looked_at
