"""The registry: a checkpoint's architecture -> the file that runs it."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache
from jaxpaged.loading.gguf_config import ARCHITECTURES as GGUF_ARCHITECTURES


class Architecture(NamedTuple):
    """One line of the registry.

    Attributes:
        family: module in this package.
        models: what people call the models, for the README.
        traits: further arguments of the family's `Config.from_hf`: how these models differ from others of the family.
        is_encoder: whether a prompt is computed whole, each token seeing all of it, and embeddings are all that it makes.
        quantizations: values of `model.quantization` that it runs with.
    """

    family: str
    models: str
    traits: Mapping[str, Any] = MappingProxyType({})
    is_encoder: bool = False
    quantizations: tuple[str, ...] = ("int8", "int4")


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture("llama", "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM, SmolLM 2"),
        "MistralForCausalLM": Architecture("llama", "Mistral 7B, Mistral Nemo, Mistral Small"),
        "MinistralForCausalLM": Architecture("llama", "Ministral 8B"),
        "QWenLMHeadModel": Architecture("qwen", "Qwen 1 (Qwen-7B-Chat and its like)"),
        "Qwen2ForCausalLM": Architecture("llama", "Qwen 2, Qwen 2.5, QwQ", {"has_qkv_bias": True}),
        "Qwen3ForCausalLM": Architecture("llama", "Qwen 3", {"has_qk_norm": True}),
        "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2", {"has_qk_norm": True, "are_norms_wide": True}),
        "MixtralForCausalLM": Architecture("mixtral", "Mixtral 8x7B, 8x22B", {"is_mixture": True}, quantizations=()),
        "Qwen2MoeForCausalLM": Architecture(
            "qwen_moe", "Qwen 1.5 MoE, Qwen 2 57B-A14B", {"has_qkv_bias": True, "is_mixture": True}, quantizations=()
        ),
        "Qwen3MoeForCausalLM": Architecture(
            "qwen_moe", "Qwen 3 30B-A3B, 235B-A22B; Qwen 3 Coder", {"has_qk_norm": True, "is_mixture": True}, quantizations=()
        ),
        "GptOssForCausalLM": Architecture("gpt_oss", "gpt-oss 20B, 120B", quantizations=()),
        "SmolLM3ForCausalLM": Architecture("llama", "SmolLM 3"),
        "GraniteForCausalLM": Architecture("granite", "Granite 3 (dense: 3.0 to 3.3, 2B and 8B)"),
        "BertModel": Architecture("bert", "MiniLM and other sentence transformers (embeddings)", is_encoder=True, quantizations=()),
        "Phi3ForCausalLM": Architecture("llama", "Phi-3, Phi-3.5, Phi-4 (mini, medium and 14B)"),
        "Gemma2ForCausalLM": Architecture("gemma", "Gemma 2", {"caps_attention": True}),
        "Gemma3ForCausalLM": Architecture("gemma", "Gemma 3 (text: 270M, 1B, and others without their vision part)", {"has_qk_norm": True}),
    }
)
"""Name in a checkpoint's `architectures` -> who runs it."""


@runtime_checkable
class ModelShape(Protocol):
    """What the engine must know of any model, whatever its family.

    Attributes:
        windows: for each layer, the positions that a token sees, itself included; None: all.
    """

    vocab: int
    embed: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int
    is_tied: bool
    windows: tuple[int | None, ...]

    @property
    def axis_sizes(self) -> dict[str, int]: ...


@runtime_checkable
class CausalLM(Protocol):
    """A language model over the flat token batch and the paged cache."""

    def __call__(self, cache: KVCache, batch: StepBatch) -> tuple[Float[Array, "tokens embed"], KVCache]: ...

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]: ...


@runtime_checkable
class Family(Protocol):
    """What a model file exports."""

    Config: Any
    Model: Any
    WEIGHTS: dict[str, tuple[str, str]]


def find_architecture(hf_config: dict[str, Any]) -> Architecture:
    """The registry's line for a checkpoint. Raises UnsupportedModelError naming its architecture and those we run."""
    names = hf_config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    given = ", ".join(map(str, names)) or "(none named in the config)"
    raise UnsupportedModelError(f"architecture {given} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")


def load_family(architecture: Architecture) -> Family:
    """The module of a family."""
    return importlib.import_module(f"{__name__}.{architecture.family}")


def make_config(architecture: Architecture, hf_config: dict[str, Any], dtype: np.dtype, max_model_len: int | None = None) -> Any:
    """The family's `Config` from a Hugging Face config.

    Args:
        max_model_len: the longest text that the engine takes; None: what the model is made for.

    Raises:
        UnsupportedModelError: a missing key, by name, or a variant that the family does not run.
    """
    try:
        return load_family(architecture).Config.from_hf(hf_config, dtype, max_model_len, **architecture.traits)
    except KeyError as error:
        raise UnsupportedModelError(f"the model's config lacks {error.args[0]!r}") from error


def models_table() -> str:
    """The table of supported models in the README, in Markdown."""
    gguf: dict[str, list[str]] = {}
    for name, read in GGUF_ARCHITECTURES.items():
        of_mixture = None if read.mixture is None else read.mixture.hf_architecture
        for architecture in (read.hf_architecture, read.windowed_hf_architecture, of_mixture):
            if architecture is not None:
                gguf.setdefault(architecture, []).append(f"`{name}`")
    rows = [
        f"| {line.models} | `{name}` | {', '.join(gguf.get(name, ['-']))} | `models/{line.family}.py` |\n"
        for name, line in ARCHITECTURES.items()
    ]
    return "| models | architecture | GGUF | file |\n| --- | --- | --- | --- |\n" + "".join(rows)
