"""Log-probabilities of an answer's tokens in OpenAI's two formats."""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from jaxpaged.request import LOWEST_LOGPROB, CompletionOutput, FinishReason, Logprob
from jaxpaged.tokenizer import Tokenizer
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.completions import CompletionLogprobs
from server.protocol.generation import PromptLogprob


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


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, PromptLogprob] | None] | None:
    """What is told of a prompt's tokens in vLLM's format: by id, the token itself first."""
    if entries is None:
        return None
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: Mapping[int, Logprob]) -> dict[str, PromptLogprob]:
    return {str(token_id): PromptLogprob(logprob.logprob, logprob.rank, logprob.decoded_token) for token_id, logprob in entry.items()}


class LegacyLogprobs:
    """Makes the log-probabilities of one answer of /v1/completions, piece by piece.

    Args:
        num_top: likeliest tokens to tell; the chosen one is always among them.
        names: how tokens are written.
        tokenizer: the model's.
        offset: characters of the text before the first token.
    """

    def __init__(self, num_top: int, names: TokenNames, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._num_top, self._names, self._tokenizer, self._offset = num_top, names, tokenizer, offset

    def take(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> CompletionLogprobs | None:
        """The entries of the next tokens; an entry of None (the first token of a prompt) has no probability."""
        if logprobs is None:
            return None
        made = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            chosen = self._unlikely(token_id) if entry is None else entry[token_id]
            made.tokens.append(self._names.name(token_id, chosen, shows_bytes=True))
            made.text_offset.append(self._next_offset(b"" if token_id in self._names.hidden_ids else chosen.token_bytes))
            if entry is None:
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
                continue
            made.token_logprobs.append(chosen.logprob)
            top = {
                self._names.name(index, logprob, shows_bytes=True): logprob.logprob
                for index, logprob in likeliest(entry, token_id, self._num_top)
            }
            top.setdefault(made.tokens[-1], chosen.logprob)
            made.top_logprobs.append(top)
        return made

    def _unlikely(self, token_id: int) -> Logprob:
        """A token that nothing comes before, which therefore has no probability."""
        return Logprob(LOWEST_LOGPROB, 0, self._tokenizer.token_text(token_id), self._tokenizer.token_bytes[token_id])

    def _next_offset(self, token: bytes) -> int:
        """Where a token begins: a part of a character begins where the character does."""
        is_inside = bool(token) and _is_continuation(token[0])
        begins = max(0, self._offset - 1) if is_inside else self._offset
        self._offset += sum(not _is_continuation(byte) for byte in token)
        return begins


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80
