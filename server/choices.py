"""Log-probabilities of an answer's tokens in OpenAI's two formats."""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from jaxpaged.request import CompletionOutput, FinishReason, Logprob
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.completions import CompletionLogprobs


class TokenNames(NamedTuple):
    """How tokens are written.

    Attributes:
        hidden_ids: control tokens, which are not in the text.
        has_ids: write token_id:N for token N.
    """

    hidden_ids: Container[int]
    has_ids: bool = False

    def name(self, token_id: int, logprob: Logprob, *, shows_bytes: bool = False) -> str:
        """A token's name; with `shows_bytes` a part of a character is written as its bytes, so that names differ as tokens do."""
        if self.has_ids:
            return f"token_id:{token_id}"
        if shows_bytes and "\ufffd" in logprob.decoded_token:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.token_bytes)
        return logprob.decoded_token

    def bytes_of(self, token_id: int, logprob: Logprob) -> list[int] | None:
        """A token's part of the text; None if it is not in it."""
        return None if token_id in self.hidden_ids else list(logprob.token_bytes)


def finish_reason(completion: CompletionOutput) -> str | None:
    """Over HTTP an answer ends with stop or length; anything else is an error and no answer."""
    reason = completion.finish_reason
    return reason.value if reason in (FinishReason.STOP, FinishReason.LENGTH) else None


def likeliest(logprobs: Mapping[int, Logprob], token_id: int, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` likeliest ids, the likeliest first; the chosen one is in `logprobs` whether it is one of them or not."""
    others = [(index, logprob) for index, logprob in logprobs.items() if index != token_id]
    if len(others) < num_top:
        others.append((token_id, logprobs[token_id]))
    return sorted(others[:num_top], key=lambda pair: (-pair[1].logprob, pair[1].rank))


def chat_logprobs(completion: CompletionOutput, num_top: int, names: TokenNames) -> ChatLogprobs | None:
    """One entry for each of the completion's tokens; None if log-probabilities were not asked for."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        chosen = logprobs[token_id]
        content.append(
            TokenLogprob(
                names.name(token_id, chosen),
                chosen.logprob,
                names.bytes_of(token_id, chosen),
                [
                    TopLogprob(names.name(index, logprob), logprob.logprob, names.bytes_of(index, logprob))
                    for index, logprob in likeliest(logprobs, token_id, num_top)
                ],
            )
        )
    return ChatLogprobs(content)


class LegacyLogprobs:
    """Makes the log-probabilities of one answer of /v1/completions, piece by piece.

    Args:
        num_top: likeliest tokens to tell; the chosen one is always among them.
        names: how tokens are written.
        offset: characters of the text before the answer.
    """

    def __init__(self, num_top: int, names: TokenNames, offset: int = 0) -> None:
        self._num_top, self._names, self._offset = num_top, names, offset

    def take(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> CompletionLogprobs | None:
        """The entries of the next tokens; an entry of None (the first token of a prompt) has no probability."""
        if logprobs is None:
            return None
        made = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            if entry is None:
                continue
            chosen = entry[token_id]
            made.tokens.append(self._names.name(token_id, chosen, shows_bytes=True))
            made.token_logprobs.append(chosen.logprob)
            top = {
                self._names.name(index, logprob, shows_bytes=True): logprob.logprob
                for index, logprob in likeliest(entry, token_id, self._num_top)
            }
            top.setdefault(made.tokens[-1], chosen.logprob)
            made.top_logprobs.append(top)
            made.text_offset.append(self._next_offset(b"" if token_id in self._names.hidden_ids else chosen.token_bytes))
        return made

    def _next_offset(self, token: bytes) -> int:
        """Where a token begins: a part of a character begins where the character does."""
        is_inside = bool(token) and _is_continuation(token[0])
        begins = max(0, self._offset - 1) if is_inside else self._offset
        self._offset += sum(not _is_continuation(byte) for byte in token)
        return begins


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80
