"""What a config.json says of weights that are stored in fewer bits, and what of it is read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.config_values import is_count

_KEY, _OLD_KEY = "quantization_config", "compression_config"
_STRATEGIES = ("tensor", "channel", "block")


class Fp8Scales(NamedTuple):
    """How weights in 8-bit floats come by their scales. `block`: rows and columns that share one; None: a tensor does, or a row."""

    block: tuple[int, int] | None


def has_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a config says that experts are stored in 4 bits."""
    return _method(config.get(_KEY)) == "mxfp4"


def fp8_scales(config: Mapping[str, Any]) -> Fp8Scales | None:
    """What a config says of scales, once `check_quantization` has passed it; None: its weights have none."""
    quantization = config.get(_KEY)
    if not isinstance(quantization, Mapping) or _method(quantization) not in ("fp8", "compressed-tensors"):
        return None
    block = quantization.get("weight_block_size")
    for group in _groups(quantization):
        block = block or group.get("block_structure")
    return Fp8Scales(None if block is None else (block[0], block[1]))


def check_quantization(config: Mapping[str, Any], source: str, *, may_be_mxfp4: bool) -> None:
    """Refuses what is not read.

    Args:
        config: a config.json.
        source: where it comes from, for messages.
        may_be_mxfp4: whether the architecture's experts may be in 4 bits.

    Raises:
        UnsupportedModelError: a method that is not read, by name.
        CheckpointError: numbers that make no sense.
    """
    for key in (_KEY, _OLD_KEY):
        quantization = config.get(key)
        if not quantization:
            continue
        method = _method(quantization)
        if key == _KEY and method == "mxfp4" and may_be_mxfp4:
            continue
        if key == _KEY and method == "fp8":
            _check_block(quantization.get("weight_block_size"), f"{source}: {key}.weight_block_size")
        elif key == _KEY and method == "compressed-tensors":
            _check_compressed_tensors(quantization, source)
        else:
            named = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
            raise _refusal(source, key, named)


def _check_compressed_tensors(quantization: Mapping[str, Any], source: str) -> None:
    groups = _groups(quantization)
    if quantization.get("format") != "float-quantized" or not groups:
        raise _refusal(source, _KEY, f"compressed-tensors with the format {quantization.get('format')!s:.60}")
    for key, usual in (("sparsity_config", "dense"), ("transform_config", None)):
        given = quantization.get(key)
        if given and not (isinstance(given, Mapping) and usual is not None and given.get("format") == usual):
            raise _refusal(source, _KEY, f"compressed-tensors with a {key}")
    blocks = set()
    for weights in groups:
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or weights.get("strategy") not in _STRATEGIES:
            said = " ".join(str(weights.get(key)) for key in ("strategy", "type", "num_bits"))
            raise _refusal(source, _KEY, f"compressed-tensors with weights of {said}")
        block = weights.get("block_structure")
        _check_block(block, f"{source}: {_KEY}.config_groups: block_structure")
        blocks |= set() if block is None else {tuple(block)}
    if len(blocks) > 1:
        raise _refusal(source, _KEY, "compressed-tensors with blocks of several sizes")


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each group of compressed-tensors says of its weights; an empty mapping where it is malformed."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    said = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    return [weights if isinstance(weights, Mapping) else {} for weights in said]


def _check_block(block: object, what: str) -> None:
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(is_count, block))):
        raise CheckpointError(f"{what} should be two positive integers, not {block!r:.60}")


def _method(quantization: object) -> object:
    return quantization.get("quant_method") if isinstance(quantization, Mapping) else None


def _refusal(source: str, key: str, method: object) -> UnsupportedModelError:
    return UnsupportedModelError(f"{source}: quantized weights ({key}: {method!s:.100}) are not supported; use the unquantized model")
