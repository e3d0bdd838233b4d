"""Streaming one answer to a terminal or pipe, and what there is to say about it."""

import statistics
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import msgspec

from jaxpaged.commands.engine_api import Prompt, TextEngine
from jaxpaged.errors import RequestFailedError
from jaxpaged.interrupts import noted_interrupts
from jaxpaged.log_format import decode_rate
from jaxpaged.request import Logprob, RequestOutput, SamplingParams


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and its figures. Times are seconds; `first_token_s` counts from the arrival of the request.

    `logprobs` and `prompt_logprobs` are as in `CompletionOutput` and `RequestOutput`; a streamed answer has none.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_s: float | None
    seconds: float
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first."""
        return decode_rate(len(self.token_ids), self.first_token_s or 0.0, self.seconds)


def answer_of(output: RequestOutput, seconds: float) -> Answer:
    """The answer in a finished output. Raises RequestFailedError when the request ended in an error."""
    if output.error is not None:
        raise RequestFailedError(output.error)
    completion = output.outputs[0]
    metrics = output.metrics
    took_s = metrics.finished_s - metrics.arrival_s if metrics.finished_s is not None else seconds
    return Answer(
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=str(completion.finish_reason or "abort"),
        stop_reason=completion.stop_reason,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        first_token_s=metrics.ttft_s,
        seconds=took_s,
        logprobs=completion.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )


def stream_answer(llm: TextEngine, prompt: Prompt, params: SamplingParams, out: TextIO) -> Answer:
    """Writes the answer to `out` as it comes. Ctrl-C ends the answer (finish reason `abort`), and the request with it.

    Raises:
        JaxpagedError: the prompt is refused or the request failed.
        BrokenPipeError: the reader of `out` is gone; the request is aborted.
    """
    started_s = time.monotonic()
    texts: list[str] = []
    token_ids: list[int] = []
    last: RequestOutput | None = None
    first_s: float | None = None
    show = plain if out.isatty() else str
    with noted_interrupts() as interrupt, _closed_at_end(llm.stream(prompt, params)) as stream:
        for output in stream:
            if output.error is not None:
                raise RequestFailedError(output.error)
            last = output
            if output.outputs[0].token_ids and first_s is None:
                first_s = time.monotonic() - started_s
            texts.append(output.outputs[0].text)
            token_ids += output.outputs[0].token_ids
            out.write(show(output.outputs[0].text))
            out.flush()
            if interrupt.is_set:
                break
    seconds = time.monotonic() - started_s
    is_finished = last is not None and last.finished
    return Answer(
        text="".join(texts),
        token_ids=token_ids,
        finish_reason=str(last.outputs[0].finish_reason) if last is not None and is_finished else "abort",
        stop_reason=last.outputs[0].stop_reason if last is not None else None,
        num_prompt_tokens=len(last.prompt_token_ids) if last is not None else 0,
        num_cached_tokens=last.num_cached_tokens if last is not None else 0,
        first_token_s=last.metrics.ttft_s if last is not None and last.metrics.ttft_s is not None else first_s,
        seconds=seconds,
    )


@contextmanager
def _closed_at_end(stream: Iterator[RequestOutput]) -> Iterator[Iterator[RequestOutput]]:
    """Closing is what aborts the request, and it must not wait for the garbage collector."""
    try:
        yield stream
    finally:
        if isinstance(stream, Generator):
            stream.close()


def plain(text: str) -> str:
    """Text for a terminal: without the control characters by which it could be commanded."""
    return "".join(c for c in text if c >= " " and not "\x7f" <= c <= "\x9f" or c in "\n\t")


def summary(answers: Sequence[Answer], seconds: float) -> str:
    """One line: tokens, tokens/s, time to first token, cached tokens."""
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    first = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    if len(answers) == 1:
        rate = answers[0].tokens_per_s
        head, median, tail = f"{num_tokens} tokens", "", f" ({answers[0].finish_reason})"
    else:
        rate = num_tokens / seconds if seconds > 0 else 0.0
        head, median, tail = f"{len(answers)} answers, {num_tokens} tokens in {seconds:.2f} s", " (median)", ""
    first_text = f", first token after {statistics.median(first):.3f} s{median}" if first else ""
    return f"{head}, {rate:.1f} tokens/s{first_text}, {num_cached} of {num_prompt_tokens} prompt tokens cached{tail}"


def as_record(index: int, prompt: object, answer: Answer) -> dict[str, object]:
    """What `--json` prints of an answer."""
    told = {"logprobs": answer.logprobs, "prompt_logprobs": answer.prompt_logprobs}
    return {
        "index": index,
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_cached_tokens": answer.num_cached_tokens,
        "first_token_s": answer.first_token_s,
        "seconds": answer.seconds,
        "tokens_per_s": answer.tokens_per_s,
    } | {name: [_told(entries) for entries in tokens] for name, tokens in told.items() if tokens is not None}


def _told(entries: dict[int, Logprob] | None) -> list[dict[str, object]] | None:
    """A token's own entry, then the likeliest ones'."""
    if entries is None:
        return None
    return [
        {"id": i, "logprob": entry.logprob, "rank": entry.rank, "text": entry.decoded_token, "bytes": list(entry.token_bytes)}
        for i, entry in entries.items()
    ]


def write_lines(out: TextIO, lines: Iterable[str]) -> None:
    """Writes and flushes."""
    for line in lines:
        out.write(line + "\n")
    out.flush()
