"""Which layers of a model have a sliding window, from the several ways in which config.json says it."""

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.loading.config_values import is_count
from jaxpaged.loading.hf_architectures import HfArchitecture, HfConfig

_KINDS = ("full_attention", "sliding_attention")


def settle_windows(config: HfConfig, architecture: HfArchitecture, source: str) -> list[str]:
    """Leaves `layer_windows`: for each layer the positions that a token sees, itself included, or None; returns what is wrong.

    A window as long as the context is none. Sizes must be settled already.

    Raises:
        UnsupportedModelError: a kind of layer that is not known, by name.
    """
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window") if "sliding_window" in config else architecture.default_window
    if architecture.window_rule in ("late", "without rope") and not config.get("use_sliding_window"):
        window = None
    if window is not None and not is_count(window):
        return [f"sliding_window should be a positive integer, not {window!r:.60}"]
    has_rope, faults = _layers_with_rope(config) if architecture.window_rule == "without rope" else ([True] * num_layers, [])
    kinds = config.get("layer_types") if architecture.has_layer_types else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers or not all(isinstance(kind, str) for kind in kinds):
            return [*faults, f"layer_types should be a list of {num_layers} names"]
        if unknown := sorted(set(kinds) - set(_KINDS)):
            raise UnsupportedModelError(f"{source}: layers of kind {unknown[0]!r:.60} are not supported; supported: {', '.join(_KINDS)}")
        is_windowed = [kind == "sliding_attention" for kind in kinds[:num_layers]]
    else:
        first_windowed = config.get("max_window_layers", 28)
        pattern = config.get("sliding_window_pattern", 6)
        if not all(isinstance(value, int) and value >= least for value, least in ((first_windowed, 0), (pattern, 1))):
            return [*faults, "max_window_layers and sliding_window_pattern should be integers"]
        is_windowed = {
            "none": [False] * num_layers,
            "all": [True] * num_layers,
            "late": [layer >= first_windowed for layer in range(num_layers)],
            "without rope": [not has for has in has_rope],
            "alternating": [layer % 2 == 0 for layer in range(num_layers)],
            "five of six": [(layer + 1) % pattern != 0 for layer in range(num_layers)],
        }[architecture.window_rule]
    if window is not None and window >= config["max_position_embeddings"]:
        window = None
    config["layer_windows"] = [window if windowed else None for windowed in is_windowed]
    config["is_windowed"], config["has_rope"] = is_windowed, has_rope
    return faults


def _layers_with_rope(config: HfConfig) -> tuple[list[bool], list[str]]:
    """SmolLM3 leaves positions out of every fourth layer: `no_rope_layers` holds 1 for the others."""
    num_layers, interval, given = config["num_hidden_layers"], config["no_rope_layer_interval"], config.get("no_rope_layers")
    if given is None:
        if not is_count(interval):
            return [True] * num_layers, [f"no_rope_layer_interval should be a positive integer, not {interval!r:.60}"]
        return [(layer + 1) % interval != 0 for layer in range(num_layers)], []
    if not isinstance(given, list) or len(given) < num_layers or not all(has in (0, 1) for has in given):
        return [True] * num_layers, [f"no_rope_layers should be a list of {num_layers} numbers, 1 for a layer with positions, else 0"]
    return [bool(has) for has in given[:num_layers]], []
