"""Bytes of single tokens and the decode rule, against the library's own decoder and against GPT-2's alphabet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.token_bytes import DecodeRule, TokenBytes, max_bytes_per_token, read_decode_rule
from tests.text.vocabularies import CONTROL, SPACE, byte_level, byte_level_backend, sentencepiece, sentencepiece_backend, spell


def test_every_byte_of_a_byte_level_vocabulary() -> None:
    token_bytes = TokenBytes(byte_level_backend(), {})
    assert [token_bytes[index] for index in range(3, 259)] == [bytes([byte]) for byte in range(256)]


def test_byte_tokens_and_spaces_of_sentencepiece() -> None:
    backend = sentencepiece_backend()
    token_bytes = TokenBytes(backend, {})
    assert [token_bytes[index] for index in range(3, 259)] == [bytes([byte]) for byte in range(256)]
    assert token_bytes[backend.token_to_id(f"{SPACE}two")] == b" two"
    assert token_bytes[backend.token_to_id("日")] == "日".encode()


def test_added_tokens_are_meant_literally() -> None:
    """An added token `éé` is two letters; the library reads it in the byte alphabet, as the bytes E9 E9."""
    backend = byte_level_backend(words=())
    backend.add_tokens([AddedToken("éé", normalized=False), AddedToken("<｜x｜>", normalized=False)])
    added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    token_bytes = TokenBytes(backend, added)
    assert token_bytes[backend.token_to_id("éé")] == "éé".encode()
    assert token_bytes[backend.token_to_id("<｜x｜>")] == "<｜x｜>".encode()
    assert token_bytes[1] == CONTROL[1].encode()


@pytest.mark.parametrize("token_id", [-1, -(2**40), 10**6, 2**31, 2**32, 2**63, 2**80])
def test_ids_outside_of_the_vocabulary_have_no_bytes(token_id: int) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        assert tokenizer.token_bytes[token_id] == b""
        assert tokenizer.decode([token_id], skip_special_tokens=False) == ""
        assert tokenizer.token_text(token_id) == ""


@pytest.mark.parametrize(
    "decoder, rule",
    [
        (decoders.ByteLevel(), DecodeRule(is_byte_level=True)),
        (decoders.Sequence([decoders.ByteLevel()]), DecodeRule(is_byte_level=True)),
        (
            decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            DecodeRule(replacements=((SPACE, " "),), has_byte_tokens=True, leading_spaces=1),
        ),
        (
            decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
            DecodeRule(replacements=((SPACE, " "),), has_byte_tokens=True),
        ),
        (decoders.Metaspace(prepend_scheme="always"), DecodeRule(replacements=((SPACE, " "),), leading_spaces=1)),
        (decoders.Metaspace(prepend_scheme="never"), DecodeRule(replacements=((SPACE, " "),))),
        (decoders.WordPiece(), DecodeRule(continuation="##", leading_spaces=1)),
    ],
)
def test_known_decoders(decoder: decoders.Decoder, rule: DecodeRule) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    assert read_decode_rule(backend) == rule


@pytest.mark.parametrize(
    "decoder, named",
    [
        (None, "none"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Strip(" ", 1, 0), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
    ],
)
def test_a_decoder_that_is_not_known_is_refused_by_name(decoder: decoders.Decoder | None, named: str) -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=named):
        read_decode_rule(backend)


BYTE_LEVEL, BYTE_LEVEL_LIBRARY = byte_level(), byte_level_backend()
SENTENCEPIECE, SENTENCEPIECE_LIBRARY = sentencepiece(), sentencepiece_backend()


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=12), skip=st.booleans())
def test_byte_level_decoding_is_the_librarys(ids: list[int], skip: bool) -> None:
    """Broken UTF-8 included: Python's and Rust's replacement of it agree."""
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL_LIBRARY.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(content=st.text(max_size=12), skip=st.booleans(), is_framed=st.booleans())
def test_sentencepiece_decoding_is_the_librarys_for_whole_characters(content: str, skip: bool, is_framed: bool) -> None:
    ids = SENTENCEPIECE.encode(content)
    ids = [1, *ids, 2] if is_framed else ids
    assert SENTENCEPIECE.decode(ids, skip) == SENTENCEPIECE_LIBRARY.decode(ids, skip_special_tokens=skip)
    if not is_framed:
        assert SENTENCEPIECE.decode(ids) == content


def test_a_broken_byte_token_spoils_its_own_character_alone() -> None:
    """The library turns the whole run of byte tokens into U+FFFDs, whatever came before: no stream can follow that."""
    ids = [3 + byte for byte in "日".encode() + b"\xff"]
    assert SENTENCEPIECE.decode(ids) == "日\ufffd"
    assert SENTENCEPIECE_LIBRARY.decode(ids) == "\ufffd" * 4


def test_the_alphabet_agrees_with_the_librarys() -> None:
    content = "naïve – 東京 🧑🏽‍🚀\x00\x7f\xa0\xad"
    [(spelled, _)] = BYTE_LEVEL_LIBRARY.pre_tokenizer.pre_tokenize_str("東京")
    assert spell("東京") == spelled
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(content)) == content


@pytest.mark.parametrize("has_nfc", [False, True])
def test_no_token_stands_for_more_bytes_than_said(has_nfc: bool) -> None:
    backend = byte_level_backend()
    if has_nfc:
        backend.normalizer = normalizers.NFC()
    longest = max_bytes_per_token(backend)
    assert longest == len("<|endoftext|>") * (3 if has_nfc else 1)
    # The worst of NFC: Hangul syllables spelled in three letters each.
    for text in ("hello hello world" * 9, "<|endoftext|>" * 9, "\u1112\u1161\u11ab" * 40, "a\u0323\u0307" * 40, "日本🧑é\n\n"):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert len(text.encode()) <= longest * len(ids)


def test_where_a_tokenizer_drops_text_nothing_is_said_of_bytes() -> None:
    assert max_bytes_per_token(sentencepiece_backend()) is None
    lowering, swallowing, removing, cutting = (byte_level_backend() for _ in range(4))
    lowering.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    swallowing.add_special_tokens([AddedToken("<|say|>", rstrip=True)])
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    cutting.enable_truncation(5)
    assert [max_bytes_per_token(backend) for backend in (lowering, swallowing, removing, cutting)] == [None] * 4
    split = byte_level_backend()
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(use_regex=False)])
    assert max_bytes_per_token(split) == 13
