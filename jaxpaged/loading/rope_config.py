"""Rotary positions in config.json: `rope_parameters` (new style) and `rope_theta`, `rope_scaling` (old style) brought into one form."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.loading.config_values import is_count, is_number, is_positive, kind_of
from jaxpaged.loading.hf_architectures import HfArchitecture, HfConfig

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_HAS_ORIGINAL = ("llama3", "yarn", "longrope")
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_MAX_FACTOR = 1e6


def settle_rope(config: HfConfig, architecture: HfArchitecture, source: str, *, has_sizes: bool) -> list[str]:
    """Leaves `rope_theta` (a float) and `rope_scaling` (None, or a dict with `rope_type` and its numbers); returns what is wrong.

    As in transformers: `rope_scaling` that is not empty counts as `rope_parameters`; a `rope_theta` in there goes before one at the top.
    An architecture with a base for windowed layers also gets `rope_local_base_freq`; parameters may then be given by kind of layer.

    Args:
        has_sizes: whether the sizes in the config are settled and right; without them their relation to rope is not looked at.

    Raises:
        UnsupportedModelError: heads that are turned in part, where transformers turns them whole; kinds of layers that turn differently.
    """
    parameters = config.pop("rope_parameters", None)
    if architecture.local_rope_theta is not None:
        parameters, faults = _global_and_local(config, parameters, architecture.local_rope_theta)
        if faults:
            return faults
    else:
        parameters = config.get("rope_scaling") or parameters or dict(architecture.rope_scaling)
    config["rope_scaling"] = None
    if not isinstance(parameters, dict):
        return [f"rope_scaling or rope_parameters should be an object, not {kind_of(parameters)}"]
    if by_kind := [key for key, value in parameters.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(f"{source}: rotary positions by kind of layer ({', '.join(by_kind):.60}) are not supported")
    theta = next(
        (value for value in (parameters.get("rope_theta"), config.get("rope_theta")) if value is not None), architecture.rope_theta
    )
    if not is_positive(theta):
        return [f"rope_theta should be a positive number, not {theta!r:.60}"]
    config["rope_theta"] = float(theta)
    faults = _settle_part(config, parameters, architecture, source) if has_sizes else []
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str):
        return [*faults, f"rope_type should be a name, not {rope_type!r:.60}"]
    rope_type = architecture.rope_aliases.get(rope_type, rope_type)
    if rope_type == "default":
        return faults
    left_out = ("type", "rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in parameters.items() if key not in left_out} | {"rope_type": rope_type}
    if rope_type in _HAS_ORIGINAL and has_sizes:
        _settle_original(config, scaling)
    config["rope_scaling"] = scaling
    return faults + (_scaling_faults(scaling, config) if has_sizes else [])


def _global_and_local(config: HfConfig, parameters: Any, local_theta: float) -> tuple[Any, list[str]]:
    """The parameters of layers that see everything; the base of the others goes into the config."""
    by_kind = parameters if isinstance(parameters, dict) else {}
    of_full, of_windowed = by_kind.get("full_attention") or {}, by_kind.get("sliding_attention") or {}
    if not isinstance(of_full, dict) or not isinstance(of_windowed, dict):
        return {}, ["rope_parameters should hold an object for each kind of layer"]
    if by_kind and not of_full and not of_windowed:
        of_full = by_kind
    local = of_windowed.get("rope_theta")
    if local is None:
        local = config.get("rope_local_base_freq")
    if local is None:
        local = local_theta
    if not is_positive(local):
        return {}, [f"rope_local_base_freq should be a positive number, not {local!r:.60}"]
    if of_windowed.get("rope_type", "default") != "default":
        return {}, [f"rope_type of windowed layers should be 'default', not {of_windowed['rope_type']!r:.60}"]
    config["rope_local_base_freq"] = float(local)
    scaling = config.get("rope_scaling") or {}
    return (of_full | scaling if isinstance(scaling, dict) else scaling), []


def _settle_part(config: HfConfig, parameters: Mapping[str, Any], architecture: HfArchitecture, source: str) -> list[str]:
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    config["partial_rotary_factor"] = part = 1.0 if part is None else part
    if architecture.partial_rotary:
        if not is_number(part) or not 0 < part <= 1 or int(config["head_dim"] * part) % 2 or int(config["head_dim"] * part) == 0:
            return [f"partial_rotary_factor should leave an even part of head_dim, not {part!r:.60}"]
    elif part != 1:
        raise UnsupportedModelError(f"{source}: partial_rotary_factor {part!r:.60} is not supported; all of head_dim is rotated")
    return []


def _settle_original(config: Mapping[str, Any], scaling: HfConfig) -> None:
    """The length before scaling; a value at the top goes before one in the parameters, as in transformers."""
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = scaling.get("original_max_position_embeddings")
    scaling["original_max_position_embeddings"] = config["max_position_embeddings"] if original is None else original
    if scaling["rope_type"] == "yarn" and scaling.get("factor") is None and is_count(scaling["original_max_position_embeddings"]):
        scaling["factor"] = config["max_position_embeddings"] / scaling["original_max_position_embeddings"]


def _scaling_faults(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the numbers of a rope type that is known; others are left to the models, which refuse them by name."""
    kind = scaling["rope_type"]
    if kind not in _NEEDED:
        return []
    faults: list[str] = []
    if not is_number(config["partial_rotary_factor"]):
        return faults
    num_pairs = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
    for key in _NEEDED[kind]:
        value = scaling.get(key)
        if key.startswith(("short", "long")):
            if not isinstance(value, list) or len(value) != num_pairs or not all(is_positive(number) for number in value):
                faults.append(f"{key} of rope type {kind!r} should be a list of {num_pairs} positive numbers")
        elif not is_positive(value) or value > _MAX_FACTOR:
            faults.append(f"{key} of rope type {kind!r} should be a positive number, not {value!r:.60}")
    for key in (*_OPTIONAL, *(("factor",) if kind == "longrope" else ())):
        if scaling.get(key) is not None and not is_positive(scaling[key]):
            faults.append(f"{key} of rope type {kind!r} should be a positive number, not {scaling[key]!r:.60}")
    if kind in _HAS_ORIGINAL and not (is_count(original := scaling["original_max_position_embeddings"]) and original > 1):
        faults.append(f"original_max_position_embeddings should be an integer above 1, not {original!r:.60}")
    if kind == "llama3" and not faults and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        faults.append("low_freq_factor of rope type 'llama3' should be below high_freq_factor")
    if kind in ("yarn", "dynamic") and not faults and (config["rope_theta"] == 1 or num_pairs < 2):
        faults.append(f"rope type {kind!r} needs a rope_theta other than 1 and heads of 4 dimensions or more")
    return faults
