"""The kinds of vocabulary that a GGUF file can hold, each built as a tokenizer of the `tokenizers` library without added tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxpaged.errors import CheckpointError
from jaxpaged.gguf_pre_tokenizers import PreTokenizer, build_pre_tokenizer

# The format's kinds of tokens, `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_SPACE: Final = "\u2581"
_CONTINUED: Final = "##"
# As BERT's own tokenizer: a longer word is unknown as a whole.
_MAX_WORD_CHARACTERS: Final = 100


def build_byte_pairs(tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> Tokenizer:
    """Pairs of bytes in the order of `merges` ("left right"), after the cuts of `pre`.

    Raises:
        CheckpointError: a merge without two halves, or of a token that is not there.
    """
    tokenizer = _build_pairs(_vocabulary(tokens), _split_merges(merges), ignore_merges=pre.ignores_merges)
    if pre.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = build_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_character_pairs(tokens: Sequence[str], merges: Sequence[str], unknown_id: int | None) -> Tokenizer:
    """Pairs of characters in the order of `merges`, bytes of a character that is no token, and spaces as U+2581. Nothing is cut before.

    Raises:
        CheckpointError: as `build_byte_pairs`.
    """
    return _build_marked(tokens, _split_merges(merges), unknown_id)


def build_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown_id: int | None, has_prefix: bool
) -> Tokenizer:
    """As `build_character_pairs`, merged by `scores`; `has_prefix`: one space goes before every text."""
    tokenizer = _build_marked(tokens, _merges_from_scores(_vocabulary(tokens), types, scores), unknown_id)
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), tokenizer.normalizer])
        tokenizer.decoder = decoders.Sequence([*_unmarking(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def build_word_pieces(tokens: Sequence[str], unknown_id: int, *, is_lowercase: bool, strips_accents: bool) -> Tokenizer:
    """The longest piece from the left, again and again, in each word of BERT's cut: at spaces, punctuation and Chinese characters.

    The file marks what begins a word with U+2581 and leaves what goes on unmarked; here they are as in BERT's own list, unmarked and
    after `##`.
    """
    vocabulary = {_unmarked(token): index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token=_unmarked(tokens[unknown_id]),
            max_input_chars_per_word=_MAX_WORD_CHARACTERS,
            continuing_subword_prefix=_CONTINUED,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=strips_accents, lowercase=is_lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUED, cleanup=False)
    return tokenizer


def _unmarked(token: str) -> str:
    if token.startswith(_SPACE):
        return token[1:]
    # `[CLS]`, `[unused7]`: neither begin nor go on.
    return token if token.startswith("[") and token.endswith("]") else _CONTINUED + token


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


def _build_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error


def _build_marked(tokens: Sequence[str], merges: list[tuple[str, str]], unknown_id: int | None) -> Tokenizer:
    unknown = None if unknown_id is None else tokens[unknown_id]
    tokenizer = _build_pairs(_vocabulary(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(_unmarking())
    return tokenizer


def _unmarking() -> list[decoders.Decoder]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _merges_from_scores(vocabulary: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    # SentencePiece joins the neighbours whose union scores best: every way of halving a token is a merge of that token's score.
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != NORMAL or not math.isfinite(scores[index]):
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(-scores[index], pair) for pair in pairs]
    ranked.sort(key=lambda item: item[0])
    return [pair for _, pair in ranked]
