"""config.json and generation_config.json: end tokens (O-51), rope base (O-52), defaults, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.hf_architectures import HF_ARCHITECTURES
from jaxpaged.loading.model_config import eos_token_ids, read_folder_config, read_generation_config
from jaxpaged.loading.safetensors_checkpoint import SafetensorsCheckpoint
from tests.tiny_model import write_tiny_llama


def _settled(folder: Path, **options: Any) -> dict[str, Any]:
    write_tiny_llama(folder, has_tokenizer=False, **options)
    return read_folder_config(folder)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "ids"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, [0, 2], (0, 2)),
        (None, 2, (2,)),
        (2, [0, 2], (2, 0)),
        (0, 0, (0,)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_count(tmp_path: Path, in_config: Any, in_generation_config: Any, ids: tuple[int, ...]) -> None:
    write_tiny_llama(tmp_path, eos_token_id=in_config, generation_eos=in_generation_config, has_tokenizer=False)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert eos_token_ids(checkpoint.hf_config, checkpoint.generation_config) == ids


@pytest.mark.parametrize("value", ["2", [2, "3"], -1, 2.5, True, {"id": 2}, [[2]]])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id should be a token id"):
        _settled(tmp_path, config={"eos_token_id": value})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id should be a token id"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize(("style", "theta"), [("old", 100_000.0), ("new", 100_000.0), ("both", 100_000.0), ("neither", 10_000.0)])
def test_rope_theta_is_found_in_both_places(tmp_path: Path, style: Any, theta: float) -> None:
    config = _settled(tmp_path, theta=100_000.0, rope_style=style)
    assert config["rope_theta"] == theta
    assert config["rope_scaling"] is None
    assert "rope_parameters" not in config


@pytest.mark.parametrize("style", ["old", "new", "both"])
@pytest.mark.parametrize("word", ["rope_type", "type"])
def test_a_rope_type_is_found_in_both_places_and_by_both_words(tmp_path: Path, style: Any, word: str) -> None:
    options: dict[str, Any] = {"rope_style": style, "theta": 50_000.0, "rope_scaling": {word: "linear", "factor": 4.0}}
    if style != "old" and word == "type":  # the maker writes rope_type: default in the new style
        options["config"] = {"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 50_000.0}}
    config = _settled(tmp_path, **options)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["rope_theta"] == 50_000.0


def test_filled_rope_scaling_goes_before_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 7.0}
    config = _settled(
        tmp_path, config={"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": parameters, "rope_theta": 9_000}
    )
    assert config["rope_theta"] == 9_000.0
    assert config["rope_scaling"]["rope_type"] == "linear"
    config = _settled(tmp_path, config={"rope_scaling": {}, "rope_parameters": parameters, "rope_theta": 9_000})
    assert config["rope_theta"] == 7.0


def test_a_rope_type_nobody_knows_stays_to_be_refused_by_the_model(tmp_path: Path) -> None:
    assert _settled(tmp_path, rope_scaling={"rope_type": "spiral"})["rope_scaling"] == {"rope_type": "spiral"}


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rope_parameters"])
def test_heads_rotated_in_part_are_refused_by_name(tmp_path: Path, key: str) -> None:
    value = 0.5 if key == "partial_rotary_factor" else {"partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5"):
        _settled(tmp_path, config={key: value})


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"rope_theta": "big"}, "rope_theta should be a positive number"),
        ({"rope_theta": -1}, "rope_theta should be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta should be a positive number"),
        ({"rope_scaling": [1]}, "should be an object, not a list"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type should be a name"),
        ({"hidden_size": "64"}, "hidden_size should be a positive integer"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers should be a positive integer"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers 1073741824 is above"),
        ({"num_attention_heads": True}, "num_attention_heads should be a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "hidden_size 64 is not a multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps should be"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be true or false"),
        ({"max_position_embeddings": -4}, "max_position_embeddings should be a positive integer"),
        ({"hidden_act": ["silu"]}, "hidden_act should be a name"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' should be a list"),
        ({"architectures": None, "model_type": None}, "names no architecture"),
    ],
)
def test_values_that_make_no_sense_are_named(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        _settled(tmp_path, config=config)
    assert "config.json" in refusal.value.message


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        _settled(tmp_path, config={"hidden_size": None, "vocab_size": -1, "rms_norm_eps": "x", "rope_theta": 0})
    for word in ("hidden_size", "vocab_size", "rms_norm_eps", "rope_theta"):
        assert word in refusal.value.message


def test_left_out_keys_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = _settled(tmp_path, tie=None, rope_style="neither", config=dict.fromkeys(left_out) | ids | {"architectures": None})
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rms_norm_eps"] == 1e-6
    assert config["max_position_embeddings"] == 2048
    assert config["hidden_act"] == "silu"
    assert config["rope_theta"] == 10_000.0
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert config[key] is False
    for key in ids:
        assert config[key] is None


def test_another_architecture_passes_as_it_is_to_be_refused_by_the_registry(tmp_path: Path) -> None:
    config = _settled(tmp_path, config={"architectures": ["GPT2LMHeadModel"], "hidden_size": None, "model_type": "gpt2"})
    assert config["architectures"] == ["GPT2LMHeadModel"]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_weights_are_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match="awq"):
        _settled(tmp_path, config={key: {"quant_method": "awq", "bits": 4}})


def test_code_of_the_folder_is_never_imported(tmp_path: Path) -> None:
    trace = tmp_path / "was_here"
    code = f"open({str(trace)!r}, 'w').close()\n"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (tmp_path / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    write_tiny_llama(tmp_path, config={"auto_map": auto_map, "trust_remote_code": True})
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        for name in checkpoint.names():
            checkpoint.read(name)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1, 2]", "JSON object, not a list"),
        (b"null", "JSON object, not null"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not valid JSON"),
        (b" " * (2**20 + 1), "larger than"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_objects_are_refused(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    write_tiny_llama(tmp_path, has_tokenizer=False)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        SafetensorsCheckpoint(tmp_path)
    assert name in refusal.value.message


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_folder_config(tmp_path)
    (tmp_path / "config.json").symlink_to("nowhere.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a symbolic link to nowhere"):
        read_folder_config(tmp_path)


def test_generation_config_is_passed_on(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.9}, has_tokenizer=False)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {"temperature": 0.6, "top_p": 0.9}


ROPE_CONFIGS: dict[str, dict[str, Any]] = {
    "old": {"rope_theta": 100_000.0},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
    "both, the same": {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    "both, different": {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 6.0}},
    "neither": {},
    "new without theta": {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
    "old scaling": {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "old scaling with a theta": {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 8.0}},
    "new scaling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 8.0}},
    "empty old scaling": {"rope_scaling": {}, "rope_theta": 9.0},
    "both scalings": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
}


@pytest.mark.parametrize("case", ROPE_CONFIGS)
def test_rope_is_what_transformers_makes_of_the_same_file(tmp_path: Path, case: str) -> None:
    from transformers import LlamaConfig

    ours = _settled(tmp_path, rope_style="neither", config=ROPE_CONFIGS[case])
    theirs = dict(LlamaConfig.from_pretrained(tmp_path).rope_parameters)
    theirs.pop("type", None)  # the older word stays beside the newer one there
    scaling = ours["rope_scaling"] or {"rope_type": "default"}
    assert {"rope_theta": ours["rope_theta"], **scaling} == theirs


def test_left_out_keys_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    keys = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    ours = _settled(tmp_path, tie=None, config=dict.fromkeys(keys))
    theirs = LlamaConfig.from_pretrained(tmp_path)
    for key in (*keys, "tie_word_embeddings"):
        assert ours[key] == getattr(theirs, key), key


CONFIGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {},
    "MinistralForCausalLM": {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "max_window_layers": 2},
    "Qwen3ForCausalLM": {"use_sliding_window": False, "sliding_window": 9},
    "MixtralForCausalLM": {},
    "Qwen2MoeForCausalLM": {"sliding_window": 9},
    "Qwen3MoeForCausalLM": {"mlp_only_layers": []},
    "GptOssForCausalLM": {},
    "SmolLM3ForCausalLM": {"use_sliding_window": True, "sliding_window": 5},
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 11},
    "Gemma2ForCausalLM": {"final_logit_softcapping": None},
    "Gemma3ForCausalLM": {"sliding_window_pattern": 3},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    """All that is left out, and the windows of layers, which transformers keeps as kinds of layers beside one width."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw = sizes | {"vocab_size": 50, "architectures": [name], "model_type": HF_ARCHITECTURES[name].model_type} | CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_folder_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    defaults = HF_ARCHITECTURES[name].defaults.keys() | HF_ARCHITECTURES[name].absent.keys()
    for key in defaults & theirs.to_dict().keys():
        assert ours[key] == getattr(theirs, key), key
    by_kind = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours["rope_theta"] == by_kind["rope_theta"]
    assert (ours["rope_scaling"] or {"rope_type": "default"}).items() <= by_kind.items()
    if "sliding_attention" in theirs.rope_parameters:
        assert ours["rope_local_base_freq"] == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert ours["layer_windows"] == [window if kind == "sliding_attention" else None for kind in kinds]
    if name == "SmolLM3ForCausalLM":
        assert ours["has_rope"] == [bool(has) for has in theirs.no_rope_layers]


def _of(folder: Path, name: str, **config: Any) -> dict[str, Any]:
    return _settled(folder, config={"architectures": [name], **config})


def test_every_architecture_is_compared_with_transformers() -> None:
    assert {"LlamaForCausalLM", "BertModel", "QWenLMHeadModel", *CONFIGS} == set(HF_ARCHITECTURES)


def test_an_encoder_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": ["BertModel"], "model_type": "bert"}))
    ours, theirs = read_folder_config(tmp_path), BertConfig.from_pretrained(tmp_path)
    for key in ("max_position_embeddings", "hidden_act", "layer_norm_eps", "type_vocab_size", "tie_word_embeddings"):
        assert ours[key] == getattr(theirs, key), key


@pytest.mark.parametrize(
    ("name", "config", "complaint"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window should be a positive integer, not 0"),
        ("MistralForCausalLM", {"sliding_window": "wide"}, "sliding_window should be a positive integer"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types should be a list of 2 names"),
        ("Qwen2ForCausalLM", {"max_window_layers": "2"}, "max_window_layers and sliding_window_pattern should be integers"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "max_window_layers and sliding_window_pattern should be integers"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": -1}, "rope_local_base_freq should be a positive number"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": [1]}}, "an object for each kind of layer"),
        ("Gemma3ForCausalLM", {"rope_scaling": [1]}, "should be an object, not a list"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0}, "final_logit_softcapping should be a positive number"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar should be a positive number"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers should be a list of 2 numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval should be a positive integer"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor should leave an even part"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": "x", "rope_scaling": {"type": "su"}}, "partial_rotary_factor should leave an even"),
    ],
)
def test_values_of_other_architectures_that_make_no_sense_are_named(
    tmp_path: Path, name: str, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        _of(tmp_path, name, **config)


def test_kinds_of_layers_that_are_not_run_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        _of(tmp_path, "Qwen3ForCausalLM", layer_types=["full_attention", "chunked_attention"])


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    assert _of(tmp_path, "MistralForCausalLM", sliding_window=511)["layer_windows"] == [511, 511]
    assert _of(tmp_path, "MistralForCausalLM", sliding_window=512)["layer_windows"] == [None, None]


def test_no_window_named_is_not_the_same_as_none(tmp_path: Path) -> None:
    settled = _of(tmp_path, "MistralForCausalLM", max_position_embeddings=8192)
    assert settled["layer_windows"] == [4096, 4096]
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    assert read_folder_config(tmp_path)["layer_windows"] == [None, None]
