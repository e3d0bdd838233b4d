"""Builds a tokenizer from the metadata of a GGUF file, which holds a vocabulary but no `tokenizer.json`.

Two kinds are known, as `tokenizer.ggml.model` names them: `gpt2` (byte-level pairs with a merge list) and `llama` (SentencePiece
pairs with scores and byte tokens). Anything else is refused by name.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.gguf_pre_tokenizers import build_pre_tokenizer, find_pre_tokenizer
from jaxpaged.loading.gguf_header import read_gguf_header
from jaxpaged.tokenizer_files import StoredTokenizer, parse_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE: Final = "\u2581"
_PREFIX: Final = "tokenizer.ggml."
# A file may name only its end-of-text token although its chat template closes a turn with another one.
_TURN_ENDS: Final = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_turn|>")


# Part of the name of every kept conversion: raised by whoever changes what a conversion gives.
_CONVERSION: Final = 1
_HASHED_BYTES: Final = 2**20


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
    if kind not in ("gpt2", "llama"):
        given = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise UnsupportedModelError(f"the GGUF file holds {given}; gpt2 and llama are supported, or pass --tokenizer FOLDER")
    tokens, types = _read_tokens(metadata)
    adds_bos, adds_eos = kind == "llama", False
    if kind == "gpt2":
        pre = find_pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
        adds_bos = pre.adds_bos
        merges = _split_merges(_strings(metadata, "merges"))
        tokenizer = _build_pairs(_vocabulary(tokens), merges, ignore_merges=pre.ignores_merges)
        if pre.is_normalized:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = build_pre_tokenizer(pre)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        scores = _numbers(metadata, "scores", [0.0] * len(tokens))
        unknown = _special_id(metadata, "unknown", len(tokens))
        has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        tokenizer = _build_sentencepiece(tokens, types, scores, unknown, has_prefix)
    _add_tokens(tokenizer, tokens, types)
    bos, eos = _special_id(metadata, "bos", len(tokens)), _special_id(metadata, "eos", len(tokens))
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and bos is not None
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", adds_eos)) and eos is not None
    _set_bos_eos(tokenizer, bos if adds_bos else None, eos if adds_eos else None)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("the GGUF file's tokenizer.chat_template is not a string")
    return StoredTokenizer(tokenizer, bos, _end_ids(metadata, tokens, types, template), template)


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


def _read_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", [_NORMAL] * len(tokens))
    num_used = len(tokens)
    while num_used and types[num_used - 1] == _UNUSED:
        num_used -= 1
    return tokens[:num_used], types[:num_used]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    # An empty token could match everywhere; llama.cpp renames it in the same way.
    return {token or f"[EMPTY_{index}]": index for index, token in enumerate(tokens)}


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        # The first character belongs to the left half even when it is a space.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(f"the GGUF file has a merge without two halves: {merge!r}")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    index = metadata.get(f"{_PREFIX}{name}_token_id")
    if index is not None and not (isinstance(index, int) and 0 <= index < num_tokens):
        raise CheckpointError(f"the GGUF file's {_PREFIX}{name}_token_id is {index}, but there are {num_tokens} tokens")
    return index


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], template: str | None) -> tuple[int, ...]:
    named = [_special_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    closing = [control[token] for token in _TURN_ENDS if token in control and template is not None and token in template]
    return tuple(dict.fromkeys(index for index in (*named, *closing) if index is not None))


def _build_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error


def _build_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown_id: int | None, has_prefix: bool
) -> Tokenizer:
    vocabulary = _vocabulary(tokens)
    unknown = None if unknown_id is None else tokens[unknown_id]
    merges = _merges_from_scores(vocabulary, types, scores)
    tokenizer = _build_pairs(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    to_space = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_space] if has_prefix else [to_space])
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_from_scores(vocabulary: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    # SentencePiece joins the neighbours whose union scores best: every way of halving a token is a merge of that token's score.
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != _NORMAL or not math.isfinite(scores[index]):
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(-scores[index], pair) for pair in pairs]
    ranked.sort(key=lambda item: item[0])
    return [pair for _, pair in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    def of_type(*wanted: int) -> list[AddedToken]:
        texts = [token for token, kind in zip(tokens, types, strict=True) if token and kind in wanted]
        return [AddedToken(text, special=_USER_DEFINED not in wanted, normalized=False) for text in texts]

    tokenizer.add_special_tokens(of_type(_UNKNOWN, _CONTROL))
    tokenizer.add_tokens(of_type(_USER_DEFINED))
