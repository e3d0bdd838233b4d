"""The option tree itself: every field is documented and readable, defaults are within their own limits, secrets stay hidden."""

import msgspec
import pytest

from jaxpaged import options
from jaxpaged.config import GIB, MIB, REDACTED, Config, ModelConfig, ServerConfig
from jaxpaged.option_aliases import ALIASES


def test_every_field_has_a_doc_and_a_type_that_options_can_have() -> None:
    table = options.option_table()
    assert len(table) == sum(len(msgspec.structs.fields(field.type)) for field in msgspec.structs.fields(Config))
    assert [path for path, option in table.items() if len(option.doc) < 10] == []
    assert all(options.sections().values())


def test_defaults_are_within_their_own_limits() -> None:
    options.validate(Config())


def test_aliases_name_fields_and_no_alias_hides_another_option() -> None:
    table = options.option_table()
    assert set(ALIASES.values()) <= set(table)
    assert len(set(ALIASES.values())) == len(ALIASES)
    flags = [flag for option in table.values() for flag in (option.flag, *("--" + a.replace("_", "-") for a in option.aliases))]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("alias", "path"),
    [
        ("model", "model.model"),
        ("dtype", "model.dtype"),
        ("max_model_len", "model.max_model_len"),
        ("max_num_seqs", "scheduler.max_num_seqs"),
        ("max_num_batched_tokens", "scheduler.max_num_batched_tokens"),
        ("gpu_memory_utilization", "cache.gpu_memory_utilization"),
        ("enable_prefix_caching", "cache.enable_prefix_caching"),
        ("tensor_parallel_size", "parallel.tensor_parallel_size"),
        ("quantization", "model.quantization"),
        ("load_format", "model.load_format"),
        ("seed", "model.seed"),
        ("served_model_name", "server.served_model_name"),
        ("host", "server.host"),
        ("port", "server.port"),
        ("api_key", "server.api_key"),
        ("chat_template", "model.chat_template"),
    ],
)
def test_vllms_spellings_are_there(alias: str, path: str) -> None:
    assert ALIASES[alias] == path


def test_a_repr_hides_secrets_and_shows_the_rest() -> None:
    shown = repr(Config(model=ModelConfig(model="org/name", hf_token="hf_abcdef"), server=ServerConfig(api_key=("sk-1", "sk-2"))))
    assert "hf_abcdef" not in shown
    assert "sk-" not in shown
    assert shown.count(REDACTED) == 2
    assert "model='org/name'" in shown
    assert "hf_token=None" in repr(Config())


def test_units() -> None:
    assert (MIB, GIB) == (1024**2, 1024**3)
