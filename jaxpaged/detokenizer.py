"""Token ids in, safe text out, a few ids at a time.

Three things are held back, and only as long as needed: the bytes of a character that is not complete (at most 3), the end of
the text that may be the beginning of a stop string (at most one character less than the longest), and nothing else. The pieces
joined are what decoding all ids at once gives, however they are cut, and each id costs a look-up, not another decoding.

What the text of an answer is:

- The bytes of the output ids, joined and read as UTF-8. A broken sequence becomes one U+FFFD as soon as it is known to be broken.
  (Hugging Face's decoder does the same for byte-level vocabularies. For SentencePiece byte tokens it turns a whole run of them,
  good characters included, into U+FFFDs when one is broken later, which no stream can follow.)
- Byte-level vocabularies keep every space. SentencePiece puts a space before a text when encoding and drops one when decoding;
  an answer that follows a prompt with text in it is not the beginning of a text, so it keeps its first space (as in vLLM).
- An answer never completes a character that the prompt left unfinished: the bytes before it belong to the prompt.
"""

import codecs
from collections.abc import Sequence

from jaxpaged.stop_strings import StopStrings
from jaxpaged.tokenizer import Tokenizer

_new_utf8_reader = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer as it grows.

    Attributes:
        stop_match: the stop string that ended the text, None as long as there is none.
        num_tokens: ids taken so far, counting the one that completed the stop string; ids given after it are not taken.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Starts an empty text.

        Args:
            prompt_token_ids: what the answer follows; see above for the little it changes.
            stop: strings that end the text. The first to be complete wins, of several at once the longest.
            include_stop: whether the text keeps the stop string at its end.
            skip_special_tokens: whether control tokens are left out. (The end token that finishes an answer is never given here.)
            min_tokens: stop strings are not looked for in the text of that many first tokens.

        Raises:
            InvalidRequestError: a stop string is empty.
        """
        self.stop_match: str | None = None
        self.num_tokens = 0
        self._bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = _new_utf8_reader("replace")
        follows_text = any(self._bytes[token_id] for token_id in prompt_token_ids if token_id not in self._hidden)
        self._leading_spaces = 0 if follows_text else self._bytes.rule.leading_spaces
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def num_held_bytes(self) -> int:
        """Bytes of an unfinished character."""
        return len(self._utf8.getstate()[0])

    @property
    def num_held_chars(self) -> int:
        """Characters that may be the beginning of a stop string."""
        return len(self._held)

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes ids until a stop string is complete and returns the text that is now safe to show."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self._give(self._utf8.decode(self._bytes.join(token_ids, self._hidden)))
        given = []
        for token_id in token_ids:
            if self.stop_match is not None:
                break
            self.num_tokens += 1
            given.append(self._give(self._utf8.decode(b"" if token_id in self._hidden else self._bytes[token_id])))
        return "".join(given)

    def finish(self) -> str:
        """The rest, when the answer ends without a stop string: what was held back, an unfinished character as one U+FFFD."""
        if self.stop_match is not None:
            return ""
        rest = self._give(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        if self._held:
            self._pieces.append(self._held)
            rest, self._held = rest + self._held, ""
        return rest

    def _give(self, text: str) -> str:
        if self._leading_spaces and text:
            text = self._drop_leading_spaces(text)
        if self._stops is not None and text and self.num_tokens > self._min_tokens:
            text = self._hold(self._stops, text)
        if text:
            self._pieces.append(text)
        return text

    def _drop_leading_spaces(self, text: str) -> str:
        num_spaces = len(text) - len(text.lstrip(" "))
        dropped = min(num_spaces, self._leading_spaces)
        # The beginning of the text is over with its first other character.
        self._leading_spaces = self._leading_spaces - dropped if num_spaces == len(text) else 0
        return text[dropped:]

    def _hold(self, stops: StopStrings, text: str) -> str:
        match = stops.advance(text)
        if match is None:
            text = self._held + text
            safe = len(text) - stops.num_held_chars
            self._held = text[safe:]
            return text[:safe]
        text, self._held = self._held + text[: match.end], ""
        self.stop_match = match.stop
        return text if self._include_stop else text[: len(text) - len(match.stop)]
