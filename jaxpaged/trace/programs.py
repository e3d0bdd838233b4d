"""The compiled programs that a trace holds beside its events: what stage each operation belongs to.

A trace is a protocol buffer, XSpace (tsl/profiler/protobuf/xplane.proto), with every program as an HloProto (xla/service/hlo.proto) in
its plane of metadata. A few fields of them are read here from the bytes, so that no library for them is needed.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxpaged.errors import BadRequestError
from jaxpaged.stages import stage_of

METADATA_PLANE = b"/host:metadata"
CONTAINERS = frozenset({b"while", b"conditional", b"call"})
"""Operations that take their time by those inside them."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}

_PLANES, _PLANE_NAME, _EVENT_METADATA = 1, 2, 4
_MAP_VALUE = 2
_METADATA_NAME, _METADATA_STATS = 2, 5
_STAT_BYTES = 6
_HLO_MODULE = 1
_COMPUTATIONS, _COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 3, 2, 5
_NAME, _OPCODE, _OP_METADATA, _CALLED = 1, 2, 7, 38
_OP_NAME = 2


class Operation(NamedTuple):
    """An operation of a program.

    Attributes:
        stage: path of stages; empty: it belongs to none.
        is_container: whether its time is that of others inside it.
    """

    stage: str
    is_container: bool


type Program = dict[str, Operation]
"""By name."""


class _Instruction(NamedTuple):
    name: str
    opcode: bytes
    stage: str
    called: list[int]


def read_programs(trace: bytes) -> dict[str, Program]:
    """Programs by the name that a trace gives them: the module's, and its number in brackets.

    Raises:
        BadRequestError: the bytes are no trace.
    """
    programs: dict[str, Program] = {}
    try:
        for number, plane in _fields(memoryview(trace)):
            if number == _PLANES and isinstance(plane, memoryview):
                programs |= _programs_of_plane(plane)
    except (IndexError, ValueError) as error:
        raise BadRequestError("this is no trace of JAX's profiler, or a damaged one") from error
    return programs


def _programs_of_plane(plane: memoryview) -> Iterator[tuple[str, Program]]:
    """Of the plane of metadata; others have none."""
    if not any(
        number == _PLANE_NAME and isinstance(value, memoryview) and value == METADATA_PLANE for number, value in _until_lines(plane)
    ):
        return
    for entry in _parts(plane, _EVENT_METADATA):
        for metadata in _parts(entry, _MAP_VALUE):
            name = b"".join(_parts(metadata, _METADATA_NAME)).decode(errors="replace")
            for stat in _parts(metadata, _METADATA_STATS):
                for hlo in _parts(stat, _STAT_BYTES):
                    for module in _parts(hlo, _HLO_MODULE):
                        yield name, _operations(module)


def _until_lines(plane: memoryview) -> Iterator[tuple[int, "int | memoryview"]]:
    """The first fields of a plane, its name among them, before the many events."""
    for number, value in _fields(plane):
        if number > _PLANE_NAME:
            return
        yield number, value


def _operations(module: memoryview) -> Program:
    """Those of a module, by name."""
    computations: dict[int, list[_Instruction]] = {}
    for computation in _parts(module, _COMPUTATIONS):
        number = next((int(value) for field, value in _fields(computation) if field == _COMPUTATION_ID and isinstance(value, int)), 0)
        computations[number] = [_instruction(part) for part in _parts(computation, _COMPUTATION_INSTRUCTIONS)]
    program: Program = {}
    for instructions in computations.values():
        for instruction in instructions:
            is_container = instruction.opcode in CONTAINERS
            stage = instruction.stage or ("" if is_container else _stage_inside(instruction, computations))
            program[instruction.name] = Operation(stage, is_container)
    return program


def _stage_inside(instruction: _Instruction, computations: dict[int, list[_Instruction]]) -> str:
    """The stage of most of what was fused into an operation that has none itself: the compiler keeps the name of one of them."""
    inside = (part.stage for number in instruction.called for part in computations.get(number, ()))
    found = Counter(stage for stage in inside if stage)
    return found.most_common(1)[0][0] if found else ""


def _instruction(part: memoryview) -> _Instruction:
    name, opcode, op_name, called = b"", b"", b"", []
    for number, value in _fields(part):
        if number == _CALLED:
            called += [value] if isinstance(value, int) else _packed(value)
        elif isinstance(value, int):
            continue
        elif number == _NAME:
            name = bytes(value)
        elif number == _OPCODE:
            opcode = bytes(value)
        elif number == _OP_METADATA:
            op_name = b"".join(_parts(value, _OP_NAME))
    return _Instruction(name.decode(), opcode, stage_of(op_name.decode(errors="replace")), called)


def _parts(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """The fields of a number that hold bytes."""
    for number, value in _fields(message):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, "int | memoryview"]]:
    """Number and value of each field: an int, or bytes. Numbers of fixed size are left out."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind == _BYTES:
            size, at = _varint(message, at)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            yield number, message[at : at + size]
            at += size
        elif kind in _FIXED_SIZES:
            at += _FIXED_SIZES[kind]
        else:
            raise ValueError(f"there is no kind {kind} of field")


def _packed(numbers: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(numbers):
        value, at = _varint(numbers, at)
        found.append(value)
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of over 64 bits")
