"""Builds a tokenizer from the metadata of a GGUF file, which holds a vocabulary but no `tokenizer.json`.

Four kinds are known, as `tokenizer.ggml.model` names them: `gpt2` (byte-level pairs with a merge list), `llama` (SentencePiece pairs
with scores and byte tokens), `gemma4` (pairs of characters with a merge list and byte tokens) and `bert` (word pieces). Anything else
is refused by name.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, processors

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.gguf_pre_tokenizers import find_pre_tokenizer
from jaxpaged.gguf_vocabularies import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    build_byte_pairs,
    build_character_pairs,
    build_sentencepiece,
    build_word_pieces,
)
from jaxpaged.loading.gguf_header import read_gguf_header
from jaxpaged.tokenizer_files import StoredTokenizer, parse_tokenizer

_PREFIX: Final = "tokenizer.ggml."
# A file may name only its end-of-text token although its chat template closes a turn with another one.
_TURN_ENDS: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_turn|>", "<turn|>", "<|tool_response>"
)  # fmt: skip


# Part of the name of every kept conversion: raised by whoever changes what a conversion gives.
_CONVERSION: Final = 2
_HASHED_BYTES: Final = 2**20
_KINDS: Final = ("gpt2", "llama", "gemma4", "bert")


class _KeptFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def load_gguf(path: Path, cache_folder: Path) -> StoredTokenizer:
    """The tokenizer of the GGUF file at `path`; its conversion is kept in `cache_folder` and found there the next time.

    A kept conversion goes by the file's size, time of change and first MiB, so that it saves reading the header (0.15 s for 50,000
    tokens) and working out the merges of a vocabulary with scores (seconds for 260,000). A folder that cannot be written is no error.

    Raises:
        CheckpointError, UnsupportedModelError: as `build_gguf_tokenizer` and `read_gguf_header`.
    """
    kept = cache_folder / f"tokenizer-{_fingerprint(path)}.json"
    return _read_kept(kept) or _convert(path, kept)


def _fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read(_HASHED_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    digest.update(repr((_CONVERSION, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


def _read_kept(kept: Path) -> StoredTokenizer | None:
    try:
        facts_line, content = kept.read_bytes().split(b"\n", 1)
        facts = msgspec.json.decode(facts_line, type=_KeptFacts)
        return StoredTokenizer(parse_tokenizer(content, kept), *msgspec.structs.astuple(facts))
    except (OSError, ValueError, msgspec.MsgspecError, CheckpointError):
        return None


def _convert(path: Path, kept: Path) -> StoredTokenizer:
    stored = build_gguf_tokenizer(read_gguf_header(path).metadata)
    facts = _KeptFacts(stored.bos_token_id, stored.eos_token_ids, stored.chat_template)
    try:
        descriptor, unfinished = tempfile.mkstemp(prefix="tokenizer-", suffix=".part", dir=kept.parent)
    except OSError:
        return stored
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(facts) + b"\n" + stored.backend.to_str().encode())
        os.replace(unfinished, kept)
    except OSError:
        os.unlink(unfinished)
    return stored


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> StoredTokenizer:
    """Converts the `tokenizer.*` keys of a GGUF file.

    Control and unknown tokens become special tokens, user-defined ones plain added tokens; unused tokens at the end of the list
    (padding of the embedding) are left out, so that their ids decode to nothing and can be kept from being sampled.

    Args:
        metadata: keys and values of the file's header; arrays of numbers as numpy arrays, arrays of strings as lists.

    Raises:
        UnsupportedModelError: a tokenizer or pre-tokenizer we do not know.
        CheckpointError: keys are missing, of unequal length, or out of range.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        given = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise UnsupportedModelError(f"the GGUF file holds {given}; known are {', '.join(_KINDS)}; pass --tokenizer FOLDER instead")
    tokens, types = _read_tokens(metadata)
    bos, eos = _special_id(metadata, "bos", len(tokens)), _special_id(metadata, "eos", len(tokens))
    adds_bos, adds_eos, adds_eos_key = True, False, "add_eos_token"
    if kind == "gpt2":
        pre = find_pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
        adds_bos = pre.adds_bos
        tokenizer = build_byte_pairs(tokens, _strings(metadata, "merges"), pre)
    elif kind == "gemma4":
        unknown = _special_id(metadata, "unknown", len(tokens))
        tokenizer = build_character_pairs(tokens, _strings(metadata, "merges"), unknown)
    elif kind == "llama":
        scores = _numbers(metadata, "scores", [0.0] * len(tokens))
        unknown = _special_id(metadata, "unknown", len(tokens))
        has_prefix = _flag(metadata, "add_space_prefix", True)
        tokenizer = build_sentencepiece(tokens, types, scores, unknown, has_prefix)
    else:
        tokenizer = _read_word_pieces(metadata, tokens, types)
        # The misspelling is the format's.
        cls, sep = _special_id(metadata, "cls", len(tokens)), _special_id(metadata, "seperator", len(tokens))
        bos, eos = (bos if cls is None else cls), (eos if sep is None else sep)
        adds_eos, adds_eos_key = True, "add_sep_token"
    _add_tokens(tokenizer, tokens, types)
    adds_bos = _flag(metadata, "add_bos_token", adds_bos) and bos is not None
    adds_eos = _flag(metadata, adds_eos_key, adds_eos) and eos is not None
    _set_bos_eos(tokenizer, bos if adds_bos else None, eos if adds_eos else None)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("the GGUF file's tokenizer.chat_template is not a string")
    return StoredTokenizer(tokenizer, bos, _end_ids(metadata, tokens, types, template), template)


def _read_word_pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    unknown = _special_id(metadata, "unknown", len(tokens))
    if unknown is None:
        raise CheckpointError(f"the GGUF file has no {_PREFIX}unknown_token_id, which word pieces need")
    # Older files do not say; a vocabulary of words in lower case alone is meant for text in lower case.
    words = (token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL and not token.startswith("["))
    is_lowercase = _flag(metadata, "normalizer.lowercase", not any("A" <= character <= "Z" for word in words for character in word))
    strips_accents = _flag(metadata, "normalizer.strip_accents", is_lowercase)
    return build_word_pieces(tokens, unknown, is_lowercase=is_lowercase, strips_accents=strips_accents)


def _set_bos_eos(tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    # The names inside the template are ours: a token's own text may hold the template's separators.
    pieces, special = ["$A:0"], []
    if bos_id is not None:
        pieces.insert(0, "bos:0")
        special.append({"id": "bos", "ids": [bos_id], "tokens": [tokenizer.id_to_token(bos_id)]})
    if eos_id is not None:
        pieces.append("eos:0")
        special.append({"id": "eos", "ids": [eos_id], "tokens": [tokenizer.id_to_token(eos_id)]})
    pair = [piece.replace("$A", "$B").replace(":0", ":1") for piece in pieces]
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, pair=[*pieces, *pair], special_tokens=special)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"the GGUF file has no list of strings {_PREFIX}{key}, which its tokenizer needs")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, otherwise: list[Any]) -> list[Any]:
    values = metadata.get(_PREFIX + key)
    if values is None:
        return otherwise
    if not isinstance(values, np.ndarray) or len(values) < len(otherwise):
        raise CheckpointError(f"the GGUF file's {_PREFIX}{key} should hold a number for each of the {len(otherwise)} tokens")
    return values.tolist()


def _flag(metadata: Mapping[str, Any], key: str, otherwise: bool) -> bool:
    return bool(metadata.get(_PREFIX + key, otherwise))


def _read_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", [NORMAL] * len(tokens))
    num_used = len(tokens)
    while num_used and types[num_used - 1] == UNUSED:
        num_used -= 1
    return tokens[:num_used], types[:num_used]


def _special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    index = metadata.get(f"{_PREFIX}{name}_token_id")
    if index is not None and not (isinstance(index, int) and 0 <= index < num_tokens):
        raise CheckpointError(f"the GGUF file's {_PREFIX}{name}_token_id is {index}, but there are {num_tokens} tokens")
    return index


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], template: str | None) -> tuple[int, ...]:
    named = [_special_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    added = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (CONTROL, USER_DEFINED)}
    closing = [added[token] for token in _TURN_ENDS if token in added and template is not None and token in template]
    return tuple(dict.fromkeys(index for index in (*named, *closing) if index is not None))


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    def of_type(*wanted: int) -> list[AddedToken]:
        texts = [token for token, kind in zip(tokens, types, strict=True) if token and kind in wanted]
        return [AddedToken(text, special=USER_DEFINED not in wanted, normalized=False) for text in texts]

    tokenizer.add_special_tokens(of_type(UNKNOWN, CONTROL))
    tokenizer.add_tokens(of_type(USER_DEFINED))
