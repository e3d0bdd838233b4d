"""Reads a tokenizer from a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxpaged.errors import CheckpointError
from jaxpaged.tiktoken_files import CHATML, END_TOKENS, QWEN_TIKTOKEN, read_tiktoken


class StoredTokenizer(NamedTuple):
    """A tokenizer and the facts beside it.

    `bos_token_id` is None and `eos_token_ids` empty where the model has none, and `config`, the content of `tokenizer_config.json` (without
    the added tokens, which `backend` knows), where it came without one.
    """

    backend: Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    config: Mapping[str, Any] | None = None


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer that `load_folder` reads."""
    return any((folder / name).is_file() for name in ("tokenizer.json", QWEN_TIKTOKEN))


def require_tokenizer(folder: Path) -> None:
    """Raises CheckpointError where `load_folder` would find none."""
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer.json; let transformers write one (AutoTokenizer.from_pretrained(...).save_pretrained(...)) "
            "or pass --tokenizer FOLDER"
        )


def load_folder(folder: Path) -> StoredTokenizer:
    """The tokenizer in `folder`.

    Which tokens are put around a text is `tokenizer.json`'s business alone: as in transformers 5, `add_bos_token` and
    `add_eos_token` of `tokenizer_config.json`, which used to say the same, are not asked.

    Raises:
        CheckpointError: a file is missing or malformed; the message names it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() and (folder / QWEN_TIKTOKEN).is_file():
        return _load_qwen(folder)
    require_tokenizer(folder)
    backend = parse_tokenizer(path.read_bytes(), path)
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    _add_missing_tokens(backend, config)
    bos_token, eos_token = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    bos = None if bos_token is None else backend.token_to_id(bos_token)
    eos = None if eos_token is None else backend.token_to_id(eos_token)
    told = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    return StoredTokenizer(backend, bos, () if eos is None else (eos,), _chat_template(folder, config), told)


def _load_qwen(folder: Path) -> StoredTokenizer:
    """Qwen 1's. Only chat models lay out conversations, and those name the layout in generation_config.json."""
    backend = read_tiktoken(folder / QWEN_TIKTOKEN)
    config = _read_json(folder / "tokenizer_config.json")
    template = _chat_template(folder, config)
    if template is None and _read_json(folder / "generation_config.json").get("chat_format") == "chatml":
        template = CHATML
    ends = tuple(index for name in END_TOKENS if (index := backend.token_to_id(name)) is not None)
    return StoredTokenizer(backend, None, ends, template, config)


def bytes_alone() -> StoredTokenizer:
    """A tokenizer for models that have none: 256 tokens, one a byte, and no special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return StoredTokenizer(backend, None, (), None)


def parse_tokenizer(content: bytes, path: Path) -> Tokenizer:
    """A tokenizer from the content of the `tokenizer.json` at `path`. Raises CheckpointError when it is malformed."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is no tokenizer that can be read: {error}") from error
    # Files saved after training may cut or pad every text to a fixed length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return content


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _add_missing_tokens(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    # Fine-tuned models sometimes list a new token in tokenizer_config.json alone.
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    for index, entry in sorted((int(index), entry) for index, entry in listed.items() if index.isdecimal() and isinstance(entry, Mapping)):
        text = _token_text(entry)
        if not text or index in known:
            continue
        if backend.token_to_id(text) not in (index, None):
            raise CheckpointError(f"tokenizer_config.json gives {text!r} the id {index}, tokenizer.json {backend.token_to_id(text)}")
        backend.add_tokens([AddedToken(text, **{flag: bool(entry[flag]) for flag in flags if flag in entry})])
        if backend.token_to_id(text) != index:
            raise CheckpointError(f"tokenizer_config.json gives {text!r} the id {index}, which tokenizer.json leaves no room for")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several templates by name; the others are for tools and retrieval.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
