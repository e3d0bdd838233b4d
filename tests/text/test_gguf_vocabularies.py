"""The kinds `gemma4` and `bert` of a GGUF file's vocabulary, worked out by hand on small ones."""

from typing import Any

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.gguf_tokenizer import build_gguf_tokenizer
from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import SPACE, bert_metadata, gemma4_metadata

PIECES = [SPACE, *"helowx", "he", "ll", "lo", "hell", "hello", f"{SPACE}h", f"{SPACE}w", "\n", "\n\n", "\n\n\n"]
# Long runs of one character have the first ranks, as in Gemma's own list.
MERGES = ["\n\n \n", "\n \n", "l l", "h e", "l o", "he ll", "hell o", f"{SPACE} h", f"{SPACE} w"]
WORDS = ["hello", "un", "the", "a", "!", "東", "ü", "##"]
ENDINGS = ["able", "s", "a", "[x]"]


def pieces_of(metadata: dict[str, Any], content: str) -> list[str]:
    return build_gguf_tokenizer(metadata).backend.encode(content).tokens


@pytest.mark.parametrize(
    "content, want",
    [
        ("hello", ["hello"]),
        (" hello w", [SPACE, "hello", f"{SPACE}w"]),
        # `l l` comes before `l o`, and `he` before the space.
        ("hellox lo", ["hello", "x", SPACE, "lo"]),
        (" h", [f"{SPACE}h"]),
        ("he\nlo", ["he", "\n", "lo"]),
        ("\n\n\n\n\nw", ["\n\n\n", "\n\n", "w"]),
        ("é東", ["<0xC3>", "<0xA9>", "<0xE6>", "<0x9D>", "<0xB1>"]),
        ("w<turn|>w", ["w", "<turn|>", "w"]),
        ("", []),
    ],
)
def test_character_pairs(content: str, want: list[str]) -> None:
    assert pieces_of(gemma4_metadata(PIECES, MERGES), content) == ["<bos>", *want]


def test_character_pairs_give_their_text_back() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(gemma4_metadata(PIECES, MERGES)))
    for content in ("hello w", "  hello \n\n", "é東\n", "", " "):
        assert tokenizer.decode(tokenizer.encode(content)) == content
    assert pieces_of(gemma4_metadata(PIECES, MERGES, add_bos_token=False), "he") == ["he"]


def test_the_ends_of_a_turn_of_gemma_4() -> None:
    """Its generation config names all three; a GGUF file names the first."""
    metadata = gemma4_metadata(PIECES, MERGES)
    assert build_gguf_tokenizer(metadata).eos_token_ids == (1,)
    metadata["tokenizer.chat_template"] = "<|turn>{{ messages[0].content }}<turn|><|tool_response>"
    assert build_gguf_tokenizer(metadata).eos_token_ids == (1, 6, 4)


def bert(**changes: Any) -> dict[str, Any]:
    return bert_metadata([*(SPACE + word for word in WORDS), *ENDINGS], **changes)


@pytest.mark.parametrize(
    "content, want",
    [
        ("hello", ["hello"]),
        ("Hello\tTHE", ["hello", "the"]),
        ("unables", ["un", "##able", "##s"]),
        # What goes on cannot begin, and what begins cannot go on.
        ("able thehello", ["[UNK]", "[UNK]"]),
        ("the!s", ["the", "!", "[UNK]"]),
        ("東a東", ["東", "a", "東"]),
        # Accents go, after which nothing is left of the letter's own token.
        ("á ü", ["a", "[UNK]"]),
        ("[SEP] [unused0]", ["[SEP]", "[UNK]", "[UNK]", "[UNK]"]),
        (f"{SPACE}the", ["[UNK]"]),
        ("a" * 100, ["a", *["##a"] * 99]),
        ("a" * 101, ["[UNK]"]),
        ("", []),
    ],
)
def test_word_pieces(content: str, want: list[str]) -> None:
    assert pieces_of(bert(), content) == ["[CLS]", *want, "[SEP]"]


@pytest.mark.parametrize(
    "changes, want",
    [
        ({}, "[CLS]the[SEP]"),
        ({"add_bos_token": False}, "the[SEP]"),
        ({"add_sep_token": False}, "[CLS]the"),
        ({"cls_token_id": None, "seperator_token_id": None}, "the"),
        ({"cls_token_id": None, "seperator_token_id": None, "bos_token_id": 3, "eos_token_id": 4}, "[CLS]the[SEP]"),
    ],
)
def test_what_is_put_around_word_pieces(changes: dict[str, Any], want: str) -> None:
    """By what the file names, of any version of the converter."""
    assert "".join(pieces_of(bert(**changes), "the")) == want


@pytest.mark.parametrize(
    "pieces, changes, want",
    [
        (["the", "ü"], {}, ["[UNK]", "the"]),
        (["the", "The", "ü"], {}, ["ü", "The"]),
        (["the", "The", "ü"], {"normalizer.lowercase": True}, ["[UNK]", "the"]),
        (["the", "ü"], {"normalizer.lowercase": False}, ["ü", "[UNK]"]),
        (["the", "ü"], {"normalizer.strip_accents": False}, ["ü", "the"]),
    ],
)
def test_case_and_accents(pieces: list[str], changes: dict[str, Any], want: list[str]) -> None:
    """As the file says, or as its words are spelled."""
    metadata = bert_metadata([*(SPACE + piece for piece in pieces), "[unusedX]"], **changes)
    assert pieces_of(metadata, "ü The")[1:-1] == want


def test_facts_of_word_pieces() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(bert()))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (3, (), {0, 2, 3, 4})
    assert tokenizer.vocab_size == 5 + len(WORDS) + len(ENDINGS)
    assert tokenizer.decode(tokenizer.encode("The unables  hello!")) == "the unables hello !"
    assert tokenizer.decode(tokenizer.encode("ables")) == ""
    assert build_gguf_tokenizer(bert()).backend.id_to_token(1) == "[unused0]"


@pytest.mark.parametrize(
    "metadata, named",
    [
        (bert(unknown_token_id=None), "unknown_token_id"),
        (bert(unknown_token_id=99), "unknown_token_id is 99"),
        (bert(seperator_token_id=99), "seperator_token_id is 99"),
        (gemma4_metadata(PIECES, []) | {"tokenizer.ggml.merges": None}, "merges"),
        (gemma4_metadata(PIECES, ["he x"]), "fit together"),
        (gemma4_metadata(PIECES, ["hello"]), "two halves"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        build_gguf_tokenizer(metadata)
