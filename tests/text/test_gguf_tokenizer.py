"""Tokenizers out of GGUF metadata: pre-tokenizers by name, both kinds of vocabulary, refusals, and the kept conversion."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from jaxpaged import gguf_tokenizer
from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.gguf_pre_tokenizers import PRE_TOKENIZERS, build_pre_tokenizer, find_pre_tokenizer
from jaxpaged.gguf_tokenizer import build_gguf_tokenizer, load_gguf
from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import SPACE, byte_level_backend, gpt2_metadata, llama_metadata, spell
from tests.tiny_model import write_tiny_gguf

SAMPLE = "I'm We'LL 12345 Ünï-x2  \n\n y"
# By hand from each model's published tokenizer.json.
PIECES = {
    "gpt-2": ["I", "'m", " We", "'", "LL", " 12345", " Ünï", "-", "x", "2", "  \n\n", " y"],
    "smollm": ["I", "'m", " We", "'", "LL", " ", *"12345", " Ünï", "-", "x", "2", "  \n\n", " y"],
    "starcoder": ["I", "'m", " We", "'", "LL", " ", *"12345", " Ünï", "-", "x", "2", "  \n\n", " y"],
    "llama-bpe": ["I", "'m", " We", "'LL", " ", "123", "45", " Ünï", "-x", "2", "  \n\n", " y"],
    "qwen2": ["I", "'m", " We", "'LL", " ", *"12345", " Ünï", "-x", "2", "  \n\n", " y"],
    "tekken": ["I", "'m", " We", "'LL", " ", *"12345", " Ünï", "-x", "2", "  \n\n", " y"],
    "gpt-4o": ["I'm", " We'LL", " ", "123", "45", " Ünï", "-x", "2", "  \n\n", " y"],
    "deepseek-v3": ["I", "'m", " We", "'LL", " ", "123", "45", " Ünï", "-x", "2", "  \n\n", " y"],
    "deepseek-coder": ["I", "'", "m", " We", "'", "LL", " ", *"12345", " Ünï", "-", "x", "2", "  ", "\n", "\n", " y"],
    "deepseek-llm": ["I", "'", "m", " We", "'", "LL", " ", *"12345", " Ü", "n", "ï", "-", "x", "2", "  ", "\n", "\n", " y"],
    "falcon": ["I", "'", "m", " We", "'", "LL", " ", "123", "45", " Ünï", "-", "x", "2", "  \n\n", " y"],
}


@pytest.mark.parametrize("name", PIECES)
def test_how_a_text_is_cut(name: str) -> None:
    cut = build_pre_tokenizer(find_pre_tokenizer(name)).pre_tokenize_str(SAMPLE)
    assert [piece for piece, _ in cut] == [spell(piece) for piece in PIECES[name]]


@pytest.mark.parametrize("content", ["", " ", SAMPLE, "東京タワー\u3000🧑🏽‍🚀 नमस्ते", "\x00\x7f\u00ad\u2028", "²³½Ⅷ٣٤٥", "a" * 300])
def test_no_cut_loses_or_repeats_text(content: str) -> None:
    for name in PRE_TOKENIZERS:
        cut = build_pre_tokenizer(find_pre_tokenizer(name)).pre_tokenize_str(content)
        assert "".join(piece for piece, _ in cut) == spell(content), name


def test_punctuation_of_deepseek_llm() -> None:
    """ASCII's and the wide forms have a cut of their own; what no expression names stays together up to the spaces at the end."""
    cut = build_pre_tokenizer(find_pre_tokenizer("deepseek-llm")).pre_tokenize_str("م؟م！？م؟\t ")
    assert [piece for piece, _ in cut] == [spell(piece) for piece in ("م؟م", "！？", "م؟", "\t ")]


def test_the_letters_of_deepseek_llm() -> None:
    """Its tokenizer.json lists 2,729 letters, one by one; those of a newer Unicode or of scripts without case are not among them."""
    every = "".join(chr(code) for code in range(0x21, 0x1F000) if not 0xD800 <= code <= 0xDFFF and not chr(code).isspace())
    letters = find_pre_tokenizer("deepseek-llm").cuts[1]
    others = [piece for piece, _ in pre_tokenizers.Split(Regex(letters), behavior="removed").pre_tokenize_str(every)]
    assert len(every) - sum(map(len, others)) == 2_729


@pytest.mark.parametrize(
    "name, like",
    [
        ("glm4", "dbrx"), ("chatglm-bpe", "dbrx"), ("mellum", "gpt-2"), ("mellum2", "smollm"), ("joyai-llm", "deepseek-v3"),
        ("stablelm2", "deepseek-r1-qwen"), ("hunyuan", "deepseek-r1-qwen"),
        ("solar-open", "deepseek-r1-qwen"), ("grok-2", "deepseek-r1-qwen"),
    ],
)  # fmt: skip
def test_names_of_one_and_the_same_cut(name: str, like: str) -> None:
    assert find_pre_tokenizer(name) == find_pre_tokenizer(like)


@pytest.mark.parametrize("name", ["kimi-k2", "bloom", "seed-coder", "bailingmoe2", "superbpe", "afmoe", "tiny_aya", "minicpm5", "jais-2"])
def test_a_cut_that_no_recorded_ids_confirm_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=repr(name)):
        find_pre_tokenizer(name)


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'llama-5'.*smollm.*--tokenizer"):
        build_gguf_tokenizer(gpt2_metadata(pre="llama-5"))


@pytest.mark.parametrize("kind", ["t5", "rwkv", "plamo2", "", None, 3])
def test_a_kind_that_is_not_known_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no tokenizer" if kind is None else repr(kind)):
        build_gguf_tokenizer(gpt2_metadata(model=kind))


def test_a_byte_level_vocabulary() -> None:
    """The same ids as the library's tokenizer that the metadata was written from."""
    stored = build_gguf_tokenizer(gpt2_metadata())
    assert (stored.bos_token_id, stored.eos_token_ids, stored.chat_template) == (1, (2,), None)
    tokenizer, reference = Tokenizer(stored), byte_level_backend()
    for content in ("hello world", " two words", "<|im_start|>the<|im_end|>", "naïve 日本🧑\n\n", "<think>the</think>", ""):
        assert tokenizer.encode(content) == reference.encode(content).ids
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.decode([*tokenizer.encode("<think>the"), 2]) == "<think>the"


def test_digits_of_smollm_are_tokens_of_their_own() -> None:
    """A merge of two digits, which the vocabulary has, must not happen."""
    metadata = gpt2_metadata()
    metadata["tokenizer.ggml.tokens"][-1:] = ["12", metadata["tokenizer.ggml.tokens"][-1]]
    metadata["tokenizer.ggml.token_type"] = np.array([*metadata["tokenizer.ggml.token_type"][:-1], 1, 4], np.int32)
    metadata["tokenizer.ggml.merges"].append("1 2")
    digits = [3 + ord(digit) for digit in "12"]
    merged = metadata["tokenizer.ggml.tokens"].index("12")
    for pre, want in (("gpt-2", [merged]), ("smollm", digits), ("qwen2", digits)):
        tokenizer = Tokenizer(build_gguf_tokenizer({**metadata, "tokenizer.ggml.pre": pre}))
        assert tokenizer.encode("12") == want, pre


def test_composed_characters_of_qwen() -> None:
    """Qwen's tokenizer.json normalizes to NFC, which a GGUF file does not say; SmolLM2's does not normalize."""
    for pre, want in (("qwen2", "é"), ("smollm", "e\u0301"), ("llama-bpe", "e\u0301")):
        tokenizer = Tokenizer(build_gguf_tokenizer(gpt2_metadata(pre=pre)))
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == want, pre


def test_unused_tokens_at_the_end_are_no_part_of_the_vocabulary() -> None:
    """O-55: a vocabulary padded to the width of the head."""
    metadata = gpt2_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{index}]" for index in range(size, size + 61)]
    metadata["tokenizer.ggml.token_type"] = np.array([*metadata["tokenizer.ggml.token_type"], *[5] * 61], np.int32)
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
    assert tokenizer.vocab_size == size
    assert tokenizer.decode([size, size + 60], skip_special_tokens=False) == ""
    assert size not in tokenizer.encode(f"[PAD{size}]")


@pytest.mark.parametrize(
    "changes, want",
    [
        ({}, "hello"),
        ({"add_bos_token": True}, "<|im_start|>hello"),
        ({"add_bos_token": True, "add_eos_token": True}, "<|im_start|>hello<|im_end|>"),
        ({"add_eos_token": True}, "hello<|im_end|>"),
        ({"pre": "llama-bpe"}, "<|im_start|>hello"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "hello"),
        ({"add_bos_token": True, "bos_token_id": None}, "hello"),
    ],
)
def test_begin_and_end_tokens(changes: dict[str, Any], want: str) -> None:
    """O-05: what the file says, or what its kind does by default."""
    tokenizer = Tokenizer(build_gguf_tokenizer(gpt2_metadata(**changes)))
    assert tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=False) == want
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"


def test_end_tokens() -> None:
    """O-51: those the file names, and the one that closes a turn of its chat template."""
    template = "{{ messages[0].content }}<|im_end|>"
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (2,)),
        ({"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 0, "eot_token_id": 2}, (0, 2)),
        ({"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2}, (0, 1, 2)),
        ({"eos_token_id": 2, "eot_token_id": 2}, (2,)),
        ({"eos_token_id": None}, ()),
    ]
    for changes, want in cases:
        assert build_gguf_tokenizer(gpt2_metadata(**changes)).eos_token_ids == want
    metadata = {**gpt2_metadata(eos_token_id=0), "tokenizer.chat_template": template}
    assert build_gguf_tokenizer(metadata).eos_token_ids == (0, 2)
    assert build_gguf_tokenizer(metadata).chat_template == template


PIECE_SCORES = [(piece, 0.0) for piece in (SPACE, *"hello w日")] + [
    ("he", -1.0), ("ll", -2.0), ("hell", -3.0), ("hello", -4.0), (f"{SPACE}w", -5.0), ("el", -6.0), (f"{SPACE}hello", -7.0)
]  # fmt: skip


def pieces_of(content: str, **changes: Any) -> list[str]:
    stored = build_gguf_tokenizer(llama_metadata(list(dict(PIECE_SCORES).items()), **changes))
    return stored.backend.encode(content).tokens


@pytest.mark.parametrize(
    "content, want",
    [
        ("hello", ["<s>", f"{SPACE}hello"]),
        ("hello w", ["<s>", f"{SPACE}hello", f"{SPACE}w"]),
        (" hello", ["<s>", SPACE, f"{SPACE}hello"]),
        # `he` scores better than `el`.
        ("hel", ["<s>", SPACE, "he", "l"]),
        ("eel", ["<s>", SPACE, "e", "el"]),
        ("日z", ["<s>", SPACE, "日", "<0x7A>"]),
        ("é", ["<s>", SPACE, "<0xC3>", "<0xA9>"]),
        ("\n", ["<s>", SPACE, "<0x0A>"]),
        ("", ["<s>"]),
        ("a</s>w", ["<s>", SPACE, "<0x61>", "</s>", f"{SPACE}w"]),
    ],
)
def test_a_sentencepiece_vocabulary(content: str, want: list[str]) -> None:
    """Worked out by hand: join the neighbours whose union scores best, spell in bytes what is no piece."""
    assert pieces_of(content) == want


def test_sentencepiece_without_a_space_before() -> None:
    assert pieces_of("hello w", add_space_prefix=False) == ["<s>", "hello", f"{SPACE}w"]
    stored = build_gguf_tokenizer(llama_metadata(list(dict(PIECE_SCORES).items()), add_space_prefix=False))
    tokenizer = Tokenizer(stored)
    for content in ("hello w", " hello", ""):
        assert tokenizer.decode(tokenizer.encode(content)) == content
    assert tokenizer.decode([stored.backend.token_to_id(f"{SPACE}w")]) == " w"


def test_sentencepiece_facts() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(llama_metadata(list(dict(PIECE_SCORES).items()))))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    for content in ("hello w", " hello  日", "é\n", " "):
        assert tokenizer.decode(tokenizer.encode(content)) == content
    assert pieces_of("hello", add_bos_token=False) == [f"{SPACE}hello"]


def changed(metadata: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {**metadata, f"tokenizer.ggml.{key}": value}


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("tokens", None, "tokens"),
        ("tokens", 5, "tokens"),
        ("tokens", np.array([1, 2]), "tokens"),
        ("merges", None, "merges"),
        ("merges", ["ab"], "'ab'"),
        ("merges", ["zz yy"], "fit together"),
        ("token_type", np.array([1, 1], np.int32), "token_type"),
        ("token_type", "x", "token_type"),
        ("bos_token_id", 10**6, "bos_token_id is 1000000"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("eot_token_id", "x", "eot_token_id is x"),
        ("chat_template", 5, None),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(key: str, value: Any, named: str | None) -> None:
    metadata = changed(gpt2_metadata(), key, value)
    if named is None:
        metadata, named = {**metadata, "tokenizer.chat_template": value}, "chat_template"
    with pytest.raises(CheckpointError, match=named):
        build_gguf_tokenizer(metadata)


def test_scores_of_the_wrong_length_are_refused() -> None:
    metadata = changed(llama_metadata(list(dict(PIECE_SCORES).items())), "scores", np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="scores"):
        build_gguf_tokenizer(metadata)


def test_a_broken_score_takes_its_piece_out_of_the_merges() -> None:
    pieces = list({**dict(PIECE_SCORES), f"{SPACE}hello": float("nan")}.items())
    assert build_gguf_tokenizer(llama_metadata(pieces)).backend.encode("hello").tokens == ["<s>", SPACE, "hello"]


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_a_file_is_converted_once(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    first = Tokenizer(load_gguf(gguf_path, cache))
    [kept] = cache.iterdir()
    monkeypatch.setattr(gguf_tokenizer, "read_gguf_header", None)
    second = Tokenizer(load_gguf(gguf_path, cache))
    assert [path.name for path in cache.iterdir()] == [kept.name]
    for tokenizer in (first, second):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
        assert tokenizer.chat_template is not None
    message = [{"role": "user", "content": "The quick brown fox <|im_end|> 123"}]
    assert first.apply_chat_template(message) == second.apply_chat_template(message)
    assert first.vocab_size == second.vocab_size == 384


FACTS = b'{"bos_token_id":1,"eos_token_ids":[2],"chat_template":null}'


@pytest.mark.parametrize("content", [b"", b"{}", b"{}\n{}", b"\xff\n", FACTS, FACTS + b'\n{"cut'])
def test_a_damaged_conversion_is_made_again(gguf_path: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    load_gguf(gguf_path, cache)
    [kept] = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    assert load_gguf(gguf_path, cache).bos_token_id == 1
    assert kept.read_bytes() == whole


def test_a_file_that_changed_is_converted_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, chat_template="a")
    assert load_gguf(path, tmp_path).chat_template == "a"
    status = path.stat()
    write_tiny_gguf(path, chat_template="b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert load_gguf(path, tmp_path).chat_template == "b"


def test_a_folder_that_cannot_be_written_is_no_error(gguf_path: Path, tmp_path: Path) -> None:
    assert load_gguf(gguf_path, tmp_path / "missing").bos_token_id == 1
    file = tmp_path / "file"
    file.write_text("")
    assert load_gguf(gguf_path, file).bos_token_id == 1


def test_no_space_left_leaves_nothing_half_written(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_tokenizer.os, "replace", full)
    assert load_gguf(gguf_path, cache).bos_token_id == 1
    assert list(cache.iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf"):
        load_gguf(tmp_path / "nowhere.gguf", tmp_path)
