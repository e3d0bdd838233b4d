"""What config.json says of a mixture of experts, in one form for all that have one."""

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.loading.config_values import is_count
from jaxpaged.loading.hf_architectures import HfConfig

_MAX_EXPERTS = 4096
_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def settle_mixture(config: HfConfig, source: str) -> list[str]:
    """Leaves `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `norm_topk_prob` and `shared_expert_intermediate_size` (or
    None); returns what is wrong. Sizes must be settled already, and defaults be filled in.

    Raises:
        UnsupportedModelError: a model of which some layers have no experts, or windows.
    """
    if config.get("num_experts") is None:
        config["num_experts"] = config.get("num_local_experts")
    config.setdefault("moe_intermediate_size", config["intermediate_size"])
    config.setdefault("norm_topk_prob", True)
    config.setdefault("shared_expert_intermediate_size", None)
    faults = [
        f"{key} should be a positive integer, not {config[key]!r:.60}"
        for key in _COUNTS
        if not (is_count(config[key]) or (key.startswith("shared") and config[key] is None))
    ]
    if not isinstance(config["norm_topk_prob"], bool):
        faults.append(f"norm_topk_prob should be true or false, not {config['norm_topk_prob']!r:.60}")
    if faults:
        return faults
    if config["num_experts"] > _MAX_EXPERTS:
        faults.append(f"num_experts {config['num_experts']} is above {_MAX_EXPERTS}")
    if config["num_experts_per_tok"] > config["num_experts"]:
        faults.append(f"num_experts_per_tok {config['num_experts_per_tok']} is above num_experts {config['num_experts']}")
    for key, usual in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("use_sliding_window", False)):
        if config.get(key) not in (None, usual):
            raise UnsupportedModelError(f"{source}: {key} {config[key]!r:.60} is not supported; every layer has experts and sees all")
    return faults
