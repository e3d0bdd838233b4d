"""Small vocabularies of both kinds, made on the spot, and GGUF metadata for them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxpaged import tokenizer as text
from jaxpaged.tokenizer_files import StoredTokenizer

SPACE = "\u2581"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    "hello",
    " hello",
    " world",
    " two",
    " words",
    "pqr",
    "stuv",
    "wx",
    "the",
    " the",
    "st",
    "op",
    "日本",
    "🧑",
    "é",
    "\n\n",
    "0 ",
    "1 ",
    "2 ",
)


@cache
def _alphabet() -> str:
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return "".join(chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256))


def spell(text_or_bytes: str | bytes) -> str:
    """Bytes as a byte-level vocabulary spells them; written from GPT-2's rule, apart from the code under test."""
    raw = text_or_bytes.encode() if isinstance(text_or_bytes, str) else text_or_bytes
    return "".join(_alphabet()[byte] for byte in raw)


def byte_level_backend(words: tuple[str, ...] = WORDS) -> Tokenizer:
    """Ids 0-2 control tokens, 3-258 the bytes 0-255, then `words` (by merges from the left) and one added token `<think>`."""
    vocabulary = {token: index for index, token in enumerate((*CONTROL, *(spell(bytes([byte])) for byte in range(256))))}
    merges: list[tuple[str, str]] = []
    for word in words:
        spelled = spell(word)
        for cut in range(1, len(spelled)):
            if spelled[: cut + 1] not in vocabulary:
                merges.append((spelled[:cut], spelled[cut]))
                vocabulary[spelled[: cut + 1]] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def sentencepiece_backend() -> Tokenizer:
    """`<unk>`, `<s>`, `</s>`, 256 byte tokens, and pieces with U+2581 for a space, as in Llama 2's tokenizer.json."""
    merges = [(SPACE, SPACE), ("w", "o"), ("t", "wo"), ("r", "d"), ("rd", "s"), ("wo", "rds"), (SPACE, "two"), (SPACE, "words")]
    pieces = [SPACE, *"twordsab日", *(left + right for left, right in merges)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend


def byte_level(chat_template: str | None = None, words: tuple[str, ...] = WORDS) -> text.Tokenizer:
    """`byte_level_backend` with begin token 1 and end token 2."""
    return text.Tokenizer(StoredTokenizer(byte_level_backend(words), 1, (2,), chat_template))


def sentencepiece() -> text.Tokenizer:
    """`sentencepiece_backend` with begin token 1 and end token 2."""
    return text.Tokenizer(StoredTokenizer(sentencepiece_backend(), 1, (2,), None))


def id_of(tokenizer: text.Tokenizer, content: str | bytes) -> int:
    """The id of the token of a byte-level vocabulary that stands for `content`."""
    raw = content.encode() if isinstance(content, str) else content
    return next(index for index in range(3, tokenizer.vocab_size) if tokenizer.token_bytes[index] == raw)


def gpt2_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a GGUF file with the vocabulary of `byte_level_backend`; None removes a key (without `tokenizer.ggml.`)."""
    backend = byte_level_backend()
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL) - 1) + [4]
    keys: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": np.array(types, np.int32), "merges": merges}
    keys |= {"bos_token_id": 1, "eos_token_id": 2} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def llama_metadata(pieces: list[tuple[str, float]], **changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, 256 byte tokens, then `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    types = np.array([2, 3, 3, *[6] * 256, *[1] * len(pieces)], np.int32)
    scores = np.array([0.0] * 259 + [score for _, score in pieces], np.float32)
    keys: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def gemma4_metadata(pieces: list[str], merges: list[str], **changes: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of character pairs: `<pad>`, `<eos>`, `<bos>`, `<unk>`, the turn tokens, 256 byte tokens, then `pieces`."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_response>", "<|turn>", "<turn|>"]
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = np.array([3, 3, 3, 3, 4, 3, 3, *[6] * 256, *[1] * len(pieces)], np.int32)
    keys: dict[str, Any] = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges}
    keys |= {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def bert_metadata(pieces: list[str], **changes: Any) -> dict[str, Any]:
    """Metadata of word pieces: `[PAD]`, `[unused0]`, `[UNK]`, `[CLS]`, `[SEP]`, then `pieces`, with U+2581 before what begins a word."""
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", *pieces]
    types = np.array([3, 1, 3, 3, 3, *[1] * len(pieces)], np.int32)
    keys: dict[str, Any] = {"model": "bert", "pre": "bert-bge", "tokens": tokens, "token_type": types}
    keys |= {"unknown_token_id": 2, "cls_token_id": 3, "seperator_token_id": 4, "padding_token_id": 0} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def save_folder(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A Hugging Face folder with tokenizer.json and, if anything is given, tokenizer_config.json."""
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
