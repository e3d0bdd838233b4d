"""Reads `config.json` and `generation_config.json` of a Hugging Face folder into one settled form.

Writers of these files differ in where they put things and in what they leave out. `settle` looks once, as transformers does, so
that a model reads plain keys. Keys that change nothing for us (`auto_map`, `use_cache`, ...) stay and are never acted upon: no
code from a model's folder is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.config_values import MAX_COUNT, is_count, is_number, is_positive, kind_of
from jaxpaged.loading.hf_architectures import HF_ARCHITECTURES, HfConfig
from jaxpaged.loading.layer_windows import settle_windows
from jaxpaged.loading.mixture_config import settle_mixture
from jaxpaged.loading.quantization_config import check_quantization
from jaxpaged.loading.rope_config import settle_rope

_MODEL_TYPES = MappingProxyType({known.model_type: name for name, known in HF_ARCHITECTURES.items()})

_REQUIRED_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MAX_LAYERS = 4096
# Real ones have some kilobytes, with long label lists a hundred; Python's objects are up to 25 times as large as their text.
_MAX_JSON_BYTES = 2**20


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises CheckpointError when it is missing, unreadable, too large or no object."""
    try:
        if not path.is_file():
            fate = "is a symbolic link to nowhere" if path.is_symlink() else "is not a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {fate}")
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not {kind_of(content)}")
    return content


def read_folder_config(folder: Path) -> HfConfig:
    """Returns the settled `config.json` of a folder. Raises CheckpointError and UnsupportedModelError, as `settle` does."""
    path = folder / "config.json"
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{folder} has no config.json: it is not a model in Hugging Face's format")
    return settle(read_json(path), str(path))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Returns `generation_config.json` of a folder, empty when there is none. Raises CheckpointError for a broken one."""
    path = folder / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return {}
    generation_config = read_json(path)
    _token_ids(generation_config, "eos_token_id", str(path))
    return generation_config


def eos_token_ids(hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer according to either file, without repeats; empty when neither names one."""
    ids = [*_token_ids(hf_config, "eos_token_id", "config.json"), *_token_ids(generation_config, "eos_token_id", "generation_config.json")]
    return tuple(dict.fromkeys(ids))


def settle(raw: Mapping[str, Any], source: str) -> HfConfig:
    """Checks a config and brings it into one form.

    Args:
        raw: as it stands in config.json, or as built from a GGUF file's metadata.
        source: where it comes from, for messages.

    Returns:
        The same keys, and `architectures` is a list of names. For an architecture whose defaults are known here, all counts,
        `num_key_value_heads`, `head_dim`, `rms_norm_eps`, `hidden_act` and `tie_word_embeddings` are there; `rope_theta` is a float;
        `rope_scaling` is None for plain positions, else a dict with `rope_type` and its numbers; `rope_parameters` is gone;
        `layer_windows` says for each layer how many positions a token sees, `has_rope` whether it is turned;
        `bos_token_id` and `eos_token_id` are there and may be None. Whether an architecture or a rope type is run, the models say.

    Raises:
        UnsupportedModelError: weights quantized in a way that is not read, or heads that are rotated in part.
        CheckpointError: a key is missing or its value makes no sense; all such keys at once.
    """
    config = dict(raw)
    config["architectures"] = names = _architectures(config, source)
    known = next((HF_ARCHITECTURES[name] for name in names if name in HF_ARCHITECTURES), None)
    if known is None:
        return config
    check_quantization(config, source, may_be_mxfp4=known.may_be_mxfp4)
    for theirs, key in known.renamed.items():
        if theirs in config:
            config.setdefault(key, config[theirs])
    for key, value in known.defaults.items():
        if config.get(key) is None:
            config[key] = value
    config = {**known.absent, **config}
    faults = _settle_counts(config)
    has_sizes = not faults
    for key in ("rms_norm_eps", "layer_norm_eps"):
        if key in config and (not is_number(config[key]) or not 0 < config[key] < 1):
            faults.append(f"{key} should be a number between 0 and 1, not {config[key]!r:.60}")
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_dynamic_ntk", "use_logn_attn"):
        if not isinstance(config.get(key, False), bool):
            faults.append(f"{key} should be true or false, not {config[key]!r:.60}")
    for key in ("hidden_act", "hidden_activation"):
        if not isinstance(config.get(key, ""), str):
            faults.append(f"{key} should be a name, not {config[key]!r:.60}")
    for key in known.positives:
        if config.get(key) is not None and not is_positive(config[key]):
            faults.append(f"{key} should be a positive number, not {config[key]!r:.60}")
    faults += settle_rope(config, known, source, has_sizes=has_sizes)
    if has_sizes:
        faults += settle_windows(config, known, source)
        faults += settle_mixture(config, source) if known.is_mixture else []
    if faults:
        raise CheckpointError(f"{source}: {'; '.join(faults)}")
    for key in ("bos_token_id", "eos_token_id"):
        config.setdefault(key, None)
        _token_ids(config, key, source)
    return config


def _architectures(config: Mapping[str, Any], source: str) -> list[str]:
    names = config.get("architectures")
    if not names and isinstance(config.get("model_type"), str):
        names = [_MODEL_TYPES.get(config["model_type"], config["model_type"])]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{source} names no architecture: 'architectures' should be a list of names, not {names!r:.60}")
    return names


def _settle_counts(config: HfConfig) -> list[str]:
    """Checks the sizes and adds those that follow from others; returns what is wrong with them."""
    faults = [f"{key} is missing" for key in _REQUIRED_COUNTS if config.get(key) is None]
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and is_count(heads) and is_count(hidden):
        if hidden % heads:
            faults.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        config["head_dim"] = hidden // heads
    for key in (*_REQUIRED_COUNTS, "num_key_value_heads", "head_dim", "max_position_embeddings", "type_vocab_size", "seq_length"):
        if config.get(key) is not None and not is_count(config[key]):
            faults.append(f"{key} should be a positive integer, not {config[key]!r:.60}")
    if faults:
        return faults
    heads = config["num_attention_heads"]
    if config["num_hidden_layers"] > _MAX_LAYERS:
        faults.append(f"num_hidden_layers {config['num_hidden_layers']} is above {_MAX_LAYERS}")
    if heads % config["num_key_value_heads"]:
        faults.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {config['num_key_value_heads']}")
    if config["head_dim"] % 2:
        faults.append(f"head_dim {config['head_dim']} is odd; rotary positions need an even one")
    return faults


def _token_ids(config: Mapping[str, Any], key: str, source: str) -> list[int]:
    """The ids under `key`, which may be absent, null, one id or a list of ids. Raises CheckpointError for anything else."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= MAX_COUNT:
            raise CheckpointError(f"{source}: {key} should be a token id or a list of them, not {value!r:.60}")
    return ids
