"""The mixtures of experts of Qwen 2 (with a shared expert beside them) and Qwen 3: Mixtral's blocks under other names."""

from jaxpaged.models.mixtral import NOT_EXPERTS, Block, Config, Model

__all__ = ["WEIGHTS", "Block", "Config", "Model"]

_MLP = "model.layers.{layer}.mlp."
_EXPERT = f"{_MLP}experts.{{expert}}."

WEIGHTS: dict[str, tuple[str, str]] = {
    **NOT_EXPERTS,
    f"{_MLP}gate.weight": ("layers.mlp.router.weight", "routes embed -> routes embed"),
    f"{_EXPERT}gate_proj.weight": ("layers.mlp.experts.gate", "ffw embed -> ffw embed"),
    f"{_EXPERT}up_proj.weight": ("layers.mlp.experts.up", "ffw embed -> ffw embed"),
    f"{_EXPERT}down_proj.weight": ("layers.mlp.experts.down", "embed ffw -> embed ffw"),
    f"{_MLP}shared_expert.gate_proj.weight": ("layers.mlp.shared.gate.weight", "shared_ffw embed -> shared_ffw embed"),
    f"{_MLP}shared_expert.up_proj.weight": ("layers.mlp.shared.up.weight", "shared_ffw embed -> shared_ffw embed"),
    f"{_MLP}shared_expert.down_proj.weight": ("layers.mlp.shared.down.weight", "embed shared_ffw -> embed shared_ffw"),
    f"{_MLP}shared_expert_gate.weight": ("layers.mlp.shared_gate.weight", "1 embed -> 1 embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's, or one expert's, parameter)."""
