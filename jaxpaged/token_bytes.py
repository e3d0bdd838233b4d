"""What each token id stands for, in bytes.

A token is not always whole characters: an emoji is spread over several, and only their bytes joined are UTF-8. So text is made
from bytes here, and `tokenizers`' own decoder, which wants the whole list of ids again for every piece of text, only tells the rule.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from jaxpaged.errors import UnsupportedModelError


class DecodeRule(NamedTuple):
    """How a token's spelling becomes bytes.

    `is_byte_level`: each character stands for one byte (GPT-2's alphabet); otherwise the spelling is UTF-8.
    `replacements`: (old, new), done in order within a token.
    `has_byte_tokens`: `<0x0A>` stands for the byte 10.
    `leading_spaces`: spaces dropped at the very beginning of a text, which encoding put there.
    `continuation`: what a piece inside a word begins with, which is dropped; any other piece gets a space before it. None: no such rule.
    """

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_tokens: bool = False
    leading_spaces: int = 0
    continuation: str | None = None


def read_decode_rule(tokenizer: Tokenizer) -> DecodeRule:
    """The rule of the tokenizer's decoder. Raises UnsupportedModelError naming a decoder that is none of the known ones."""
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
    rule, is_fused = DecodeRule(), False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                rule = rule._replace(is_byte_level=True)
            case {"type": "ByteFallback"}:
                rule = rule._replace(has_byte_tokens=True)
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not is_fused:
                rule = rule._replace(replacements=(*rule.replacements, (old, new)))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if is_fused:
                rule = rule._replace(leading_spaces=start)
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                rule = rule._replace(replacements=((mark, " "),), leading_spaces=0 if scheme == "never" else 1)
            case {"type": "WordPiece", "prefix": prefix}:
                rule = rule._replace(continuation=prefix, leading_spaces=1)
            case _:
                raise UnsupportedModelError(f"the tokenizer's decoder step {_shown(step)} is not supported")
    return rule


class TokenBytes:
    """Bytes of single tokens, worked out when first asked for."""

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, str]) -> None:
        """`added`: id -> text of the added tokens, whose text is meant literally."""
        self.rule: Final = read_decode_rule(tokenizer)
        self._spelling = tokenizer.id_to_token
        self._added = added
        self._alphabet = _byte_alphabet() if self.rule.is_byte_level else {}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id outside of the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._bytes(token_id)
            # Ids outside of the vocabulary are without number and are not kept.
            if found:
                self._known[token_id] = found
        return found

    def join(self, token_ids: Collection[int], hidden: Collection[int] = ()) -> bytes:
        """Bytes of all tokens but the `hidden` ones, joined."""
        return b"".join([self[token_id] for token_id in token_ids if token_id not in hidden])

    def _bytes(self, token_id: int) -> bytes:
        spelling = self._spelling(token_id) if 0 <= token_id < 2**32 else None
        if spelling is None:
            return b""
        if self.rule.is_byte_level:
            # A spelling outside of the alphabet is meant literally, too: a token that was added without being marked so.
            is_literal = token_id in self._added or not self._alphabet.keys() >= set(spelling)
            return spelling.encode() if is_literal else bytes([self._alphabet[character] for character in spelling])
        if self.rule.has_byte_tokens and len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            try:
                return bytes([int(spelling[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.rule.replacements:
            spelling = spelling.replace(old, new)
        if (mark := self.rule.continuation) is not None:
            spelling = spelling.removeprefix(mark) if spelling.startswith(mark) else " " + spelling
        return spelling.encode()


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token stands for at most; None where that cannot be told.

    It can for byte-level vocabularies whose tokenizer drops nothing of the text on the way.
    """
    normalizer, pre_tokenizer, decoder = (_state(part) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder))
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    is_whole = (
        tokenizer.truncation is None
        and decoder["type"] == "ByteLevel"
        and normalizer["type"] in ("none", "NFC")
        and all(step["type"] in ("ByteLevel", "Digits", "Split") and step.get("behavior") != "Removed" for step in steps)
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    if not is_whole:
        return None
    alphabet = _byte_alphabet().keys()
    longest = max((len(name) if alphabet >= set(name) else len(name.encode()) for name in tokenizer.get_vocab()), default=0)
    # NFC makes UTF-8 shorter by a factor of 3 at most (Unicode Standard Annex 15, table of expansion factors).
    return max(1, longest) * (3 if normalizer["type"] == "NFC" else 1)


def _state(part: Any) -> dict[str, Any]:
    return {"type": "none"} if part is None else json.loads(part.__getstate__())


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _shown(step: Any) -> str:
    text = "none" if step is None else json.dumps(step, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."
