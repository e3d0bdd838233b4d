"""Options from every source: what is read, what wins, and the sentence for what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import options
from jaxpaged.config import REDACTED, CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig
from jaxpaged.errors import ConfigError
from jaxpaged.option_aliases import ALIASES
from jaxpaged.option_values import parse_size
from tests.sample_options import ANOTHER_VALUE


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        options.load(**sources)
    assert "\n" not in caught.value.message
    return caught.value.message


def kwargs_refusal(**kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        options.from_kwargs(**kwargs)
    return caught.value.message


def test_the_table_of_values_covers_every_option() -> None:
    assert set(ANOTHER_VALUE) == set(options.option_table())


@pytest.mark.parametrize("path", ANOTHER_VALUE)
def test_every_option_is_read_from_flag_alias_variable_yaml_and_keyword(path: str, tmp_path: Path) -> None:
    text, value = ANOTHER_VALUE[path]
    option = options.option_table()[path]
    file = tmp_path / "options.yaml"
    file.write_text(f"{option.section}:\n  {option.name}: {text!r}\n", encoding="utf-8")
    nested = {option.section: {option.name: text}} if option.section != "model" else {path: text}
    trees = [
        options.load({path: text}),
        options.load({path.replace("_", "-"): text}),
        options.load(env={option.env: text}),
        options.load(config_path=file),
        options.from_kwargs(**nested),
        *(options.from_kwargs(**{alias: text}) for alias in option.aliases),
        *(options.load(env={"JAXPAGED_" + alias.upper(): text}) for alias in option.aliases),
        *(options.load({alias.replace("_", "-"): text}) for alias in option.aliases),
    ]
    assert [options.value_at(tree, path) for tree in trees] == [value] * len(trees)
    assert len({repr(tree) for tree in trees}) == 1


def test_flags_win_over_environment_over_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("cache:\n  page_size: 8\nmax_num_seqs: 5\nscheduler:\n  max-num-batched-tokens: 64\n", encoding="utf-8")
    env = {"JAXPAGED_CACHE__PAGE_SIZE": "16", "JAXPAGED_SCHEDULER__MAX_NUM_SEQS": "6", "HOME": "/root", "JAXPAGED_HOME": "/cache"}
    loaded = options.load_with_origins({"block-size": "32"}, file, env)
    assert loaded.config == Config(cache=CacheConfig(page_size=32), scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64))
    assert loaded.origins == {
        "cache.page_size": "--block-size",
        "scheduler.max_num_seqs": "JAXPAGED_SCHEDULER__MAX_NUM_SEQS",
        "scheduler.max_num_batched_tokens": f"{file}: scheduler.max-num-batched-tokens",
    }


def test_keywords_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_CACHE__PAGE_SIZE", "64")
    assert options.from_kwargs().cache.page_size == 16


def test_a_section_as_keyword_is_a_mapping_or_its_struct() -> None:
    wanted = Config(cache=CacheConfig(page_size=4, memory=2**20))
    assert options.from_kwargs(cache={"page_size": 4, "memory": "1MiB"}) == wanted
    assert options.from_kwargs(cache=CacheConfig(page_size=4, memory=2**20)) == wanted
    assert options.from_kwargs(model="org/name").model == ModelConfig(model="org/name")


@pytest.mark.parametrize(
    ("sources", "parts"),
    [
        ({"overrides": {"cache.pagesize": 1}}, ["cache.pagesize", "cache.page_size"]),
        ({"overrides": {"max-model-length": 1}}, ["max-model-length", "max_model_len"]),
        ({"env": {"JAXPAGED_CACHE__PAGESIZE": "1"}}, ["JAXPAGED_CACHE__PAGESIZE", "JAXPAGED_CACHE__PAGE_SIZE"]),
        ({"env": {"JAXPAGED_CACH__PAGE_SIZE": "1"}}, ["JAXPAGED_CACH__PAGE_SIZE", "JAXPAGED_CACHE__PAGE_SIZE"]),
        ({"env": {"JAXPAGED_MAX_MODEL_LENGTH": "1"}}, ["JAXPAGED_MAX_MODEL_LENGTH", "JAXPAGED_MAX_MODEL_LEN"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(sources: dict[str, Any], parts: list[str]) -> None:
    message = refusal(**sources)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("cache:\n  page_sise: 3\n", ["cache.page_sise", "cache.page_size", "options.yaml"]),
        ("cahce: {page_size: 3}\n", ["cahce", "nearest is cache"]),
        ("cach:\n  page_size: 3\n", ["cach", "nearest is cache"]),
        ("scheduler:\n  max_seqs: 3\n", ["scheduler.max_seqs", "scheduler.max_num_seqs"]),
        ("cache: 3\n", ["cache", "section"]),
        ("max-modellen: 3\n", ["max-modellen", "max_model_len"]),
        ("cache:\n  page_size: 3\n  page_size: 4\n", ["page_size", "twice"]),
        ("cache:\n  page_size: 3\nblock-size: 4\n", ["cache.page_size", "twice", "block-size"]),
        ("cache: [", ["not YAML", "line"]),
        ("- 1\n", ["mapping"]),
        ("cache:\n  page_size: x\n", ["cache.page_size", "'x'", "1 to 256"]),
        ("cache:\n  memory: 12 parsecs\n", ["cache.memory", "512MiB"]),
        ("cache:\n  enable_prefix_caching: 3\n", ["cache.enable_prefix_caching", "true or false"]),
        ("cache:\n  page_size: .nan\n", ["cache.page_size"]),
        ("log:\n  interval_s: .inf\n", ["log.interval_s", "3600"]),
        ("1: 2\n", ["1"]),
        ("!!python/object/apply:os.system ['true']\n", ["not YAML"]),
    ],
)
def test_bad_yaml_is_one_sentence(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text, encoding="utf-8")
    message = refusal(config_path=file)
    assert [part for part in parts if part not in message] == []


def test_every_variable_that_a_page_names_is_one() -> None:
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *root.glob("docs/*.md"), *(path for path in (root / "configs").rglob("*") if path.is_file())]
    named = {name for page in pages for name in re.findall(r"\bJAXPAGED_[A-Z0-9_]+", page.read_text(encoding="utf-8"))}
    known = {option.env for option in options.option_table().values()}
    known |= {f"JAXPAGED_{alias.upper()}" for alias in ALIASES} | options.ENV_NOT_OPTIONS
    assert len(named) >= 4
    assert named <= known


def test_what_a_service_called_jaxpaged_puts_into_containers_is_no_option() -> None:
    env = {
        "JAXPAGED_SERVICE_HOST": "10.0.0.1",
        "JAXPAGED_SERVICE_PORT": "80",
        "JAXPAGED_SERVICE_PORT_HTTP": "80",
        "JAXPAGED_PORT": "tcp://10.0.0.1:80",
        "JAXPAGED_PORT_80_TCP": "tcp://10.0.0.1:80",
        "JAXPAGED_PORT_80_TCP_ADDR": "10.0.0.1",
        "JAXPAGED_PORT_80_TCP_PORT": "80",
        "JAXPAGED_PORT_80_TCP_PROTO": "tcp",
        "JAXPAGED_ADMIN_SERVICE_HOST": "10.0.0.2",
    }
    assert options.load(env=env) == Config()
    assert options.load(env={"JAXPAGED_PORT": "80"}).server.port == 80
    assert "server.port" in refusal(env={"JAXPAGED_PORT": "tcp"})
    assert "unknown" in refusal(env={"JAXPAGED_SERVICE": "x"})


def test_vllms_words_for_the_types_of_the_cache() -> None:
    said = {word: options.from_kwargs(kv_cache_dtype=word).cache.dtype for word in ("fp8", "bfloat16", "float16", "float32", "bf16")}
    assert said == {"fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "bf16": "bf16"}
    assert "fp8_e5m2" in refusal(overrides={"kv-cache-dtype": "fp8_e5m2"})
    assert options.from_kwargs(seed=None).model.seed is None


def test_yaml_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no.yaml" in refusal(config_path=tmp_path / "no.yaml")
    assert str(tmp_path) in refusal(config_path=tmp_path)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (options.MAX_CONFIG_BYTES + 1))
    assert str(options.MAX_CONFIG_BYTES) in refusal(config_path=large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not YAML" in refusal(config_path=binary)


def test_an_empty_yaml_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("# nothing\ncache:\n", encoding="utf-8")
    assert options.load(config_path=file) == Config()


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"max_model_length": 1}, ["max_model_length", "max_model_len"]),
        ({"block_size": 0}, ["cache.page_size", "0", "1 to 256", "block_size"]),
        ({"block_size": 10**30}, ["cache.page_size"]),
        ({"block_size": "9" * 5000}, ["cache.page_size"]),
        ({"block_size": True}, ["cache.page_size", "True"]),
        ({"block_size": 16.0}, ["cache.page_size"]),
        ({"block_size": None}, ["cache.page_size"]),
        ({"gpu_memory_utilization": 0}, ["cache.gpu_memory_utilization"]),
        ({"gpu_memory_utilization": math.nan}, ["cache.gpu_memory_utilization", "nan"]),
        ({"gpu_memory_utilization": 1.01}, ["cache.gpu_memory_utilization"]),
        ({"seed": -1}, ["model.seed", "-1"]),
        ({"max_model_len": 0}, ["model.max_model_len"]),
        ({"max_model_len": -2}, ["model.max_model_len"]),
        ({"dtype": "fp16"}, ["model.dtype", "float16"]),
        ({"model": ""}, ["model.model"]),
        ({"cache": 3}, ["cache", "section"]),
        ({"cache": {"memory": "0"}}, ["cache.memory"]),
        ({"enable_prefix_caching": "perhaps"}, ["cache.enable_prefix_caching", "perhaps"]),
        ({"compilation": {"token_buckets": []}}, ["compilation.token_buckets"]),
        ({"compilation": {"token_buckets": [2, 0]}}, ["compilation.token_buckets"]),
        ({"compilation": {"token_buckets": [2, 64]}, "max_num_batched_tokens": 128}, ["compilation.token_buckets", "64", "128"]),
        ({"max_num_batched_tokens": 15}, ["scheduler.max_num_batched_tokens 15", "one page of 16 tokens"]),
        ({"block_size": 64, "max_num_batched_tokens": 63}, ["scheduler.max_num_batched_tokens 63", "one page of 64 tokens"]),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, ["scheduler.max_num_seqs 65", "max_num_batched_tokens 64"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", "0"]),
        ({"max_num_queued_reqs": 0}, ["max_num_queued_reqs", "0"]),
        ({"scheduler": {"max_num_queued_tokens": -5}}, ["scheduler.max_num_queued_tokens", "-5"]),
        ({"scheduler": {"reserve_pages": -1}}, ["scheduler.reserve_pages", "-1"]),
        ({"scheduler": {"ageing_s": 0}}, ["scheduler.ageing_s", "0"]),
        ({"scheduler": {"ageing_s": math.inf}}, ["scheduler.ageing_s", "inf"]),
        ({"scheduler": {"target_itl_s": math.nan}}, ["scheduler.target_itl_s", "nan"]),
        ({"scheduler": {"target_ttft_s": -1.0}}, ["scheduler.target_ttft_s", "-1"]),
        ({"scheduler": {"queue_timeout_s": 0}}, ["scheduler.queue_timeout_s", "0"]),
        ({"scheduler": {"request_timeout_s": -2}}, ["scheduler.request_timeout_s", "-2"]),
    ],
)
def test_bad_keywords_are_one_sentence(kwargs: dict[str, Any], parts: list[str]) -> None:
    message = kwargs_refusal(**kwargs)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"quantization": "fp8"}, "quantization 'fp8' is not served yet"),
        ({"trust_remote_code": True}, "trust_remote_code is refused"),
        ({"enforce_eager": True}, "enforce_eager is refused"),
    ],
)
def test_what_is_not_served_is_refused_by_name(kwargs: dict[str, Any], part: str) -> None:
    assert part in kwargs_refusal(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"revision": "v1.0", "model": "org/name"},
        {"hf_token": "hf_1"},
        {"offline": True},
        {"tokenizer": "org/other"},
        {"load_format": "safetensors"},
        {"block_size": 64},
        {"enforce_eager": False},
        {"trust_remote_code": False},
        {"quantization": None},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"tensor_parallel_size": 2},
        {"max_logprobs": 0},
        {"max_model_len": "auto"},
        {"max_model_len": -1},
        {"max_model_len": None},
        {"max_num_batched_tokens": 16, "block_size": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 16},
        {"scheduler": {"reserve_pages": 0}},
    ],
)
def test_what_is_served_is_accepted(kwargs: dict[str, Any]) -> None:
    config = options.from_kwargs(**kwargs)
    options.validate(config)


def test_minus_one_is_vllms_auto() -> None:
    assert options.from_kwargs(max_model_len=-1).model.max_model_len == "auto"
    assert options.load({"max-model-len": "-1"}).model.max_model_len == "auto"
    assert options.load({"max-model-len": "none"}).model.max_model_len is None


def test_validate_checks_a_tree_made_by_hand() -> None:
    with pytest.raises(ConfigError, match=r"cache\.page_size .* 0"):
        options.validate(Config(cache=CacheConfig(page_size=0)))
    with pytest.raises(ConfigError, match="quantization"):
        options.validate(Config(model=ModelConfig(quantization="awq")))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("32k", 32000),
        ("32K", 32768),
        ("1.5k", 1500),
        ("25.6k", 25600),
        ("2M", 2**21),
        ("2m", 2_000_000),
        ("1_000", 1000),
        (" 7 ", 7),
        ("-3", -3),
    ],
)
def test_counts_take_vllms_suffixes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("512MiB", 2**29), ("1.5GiB", 3 * 2**29), ("2GB", 2 * 10**9), ("2 gib", 2**31), ("100B", 100), ("1T", 2**40), ("0.3kB", 300)],
)
def test_sizes_take_byte_units(text: str, value: int) -> None:
    assert parse_size(text, is_bytes=True) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1e3", "0x10", "1MiB", "--1", "١", "1 2", "1,000", "inf", "nan"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a count"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from(["", "k", "K", "m", "M", "g", "G", "t", "T"]))
def test_suffixes_multiply(number: int, suffix: str) -> None:
    factor = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
    assert parse_size(f"{number}{suffix}") == number * factor[suffix]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
trees = st.builds(
    Config,
    model=st.builds(
        ModelConfig,
        model=texts,
        tokenizer=st.none() | texts.filter(lambda text: text.strip().lower() not in ("none", "null", "~")),
        dtype=st.sampled_from(["auto", "float32", "half"]),
        max_model_len=st.none() | st.just("auto") | st.integers(1, 2**40),
        seed=st.integers(0, 2**63 - 1),
    ),
    cache=st.builds(
        CacheConfig, page_size=st.integers(1, 256), gpu_memory_utilization=st.floats(0.01, 1), memory=st.none() | st.integers(1, 2**50)
    ),
    server=st.builds(ServerConfig, api_key=st.lists(st.sampled_from(["sk-1", "a b", "none", "1"]), max_size=3).map(tuple)),
)


@given(trees)
def test_to_yaml_is_read_back(tmp_path_factory: pytest.TempPathFactory, tree: Config) -> None:
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    file.write_text(options.to_yaml(tree, redact=False), encoding="utf-8")
    assert options.load(config_path=file) == tree


def test_to_yaml_hides_secrets_and_shows_origins() -> None:
    loaded = options.load_with_origins({"hf-token": "hf_abc", "api-key": ["sk-1", "sk-2"]}, env={"JAXPAGED_PORT": "9000"})
    text = options.to_yaml(loaded.config, origins=loaded.origins)
    assert "hf_abc" not in text
    assert "sk-" not in text
    assert text.count(REDACTED) == 2
    assert "port: 9000  # JAXPAGED_PORT" in text


def test_a_refused_secret_is_not_shown() -> None:
    message = kwargs_refusal(hf_token=12345)
    assert "12345" not in message
    assert "sk-secret" not in kwargs_refusal(api_key=["sk-secret", 7])


@pytest.mark.parametrize(
    ("name", "near"),
    [("page_size", "cache.page_size"), ("max_num_seq", "max_num_seqs"), ("cache.dtyp", "cache.dtype"), ("zzzzzz", None)],
)
def test_the_nearest_name(name: str, near: str | None) -> None:
    assert options.nearest(name, ["max_num_seqs", *options.option_table()]) == near
