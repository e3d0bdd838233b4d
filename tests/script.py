"""What SCRIPT says: functions from a history to the next id, and the logits that peak on it.

The logits at each place are 0 for the scripted id, -1 for the id after it, -2 for the next and so on, around the vocabulary. So a
scripted id that may not be chosen (an end token before `min_tokens`, a bad word, an id outside of `allowed_token_ids`) gives way to
the first one after it that may, and the likeliest ids are those that follow the scripted one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.logprobs import LogprobRows, StepResult
from jaxpaged.request import MAX_LOGPROBS, MAX_SEED, SEED_STRIDE
from jaxpaged.sampling import NO_ID
from jaxpaged.slot_rows import SlotRow

type History = tuple[int, ...]
"""Token ids of one row's sequence, prompt first, up to the last one computed."""


def free_talk(vocab: int, *, avoid: Iterable[int] = ()) -> Callable[[History], int]:
    """A model whose next id hangs on every id before it and on their order, and is none of `avoid`."""
    ids = [index for index in range(vocab) if index not in set(avoid)]

    def next_id(history: History) -> int:
        number = 0
        for token_id in history:
            number = (number * 1_000_003 + token_id * 7_919 + 12_345) % ((1 << 61) - 1)
        return ids[number % len(ids)]

    return next_id


def follow(answers: Mapping[History, Sequence[int]]) -> Callable[[History], int]:
    """A model that gives each prompt its own list of ids; asked for more, it gives the last one again."""

    def next_id(history: History) -> int:
        for prompt, answer in answers.items():
            if history[: len(prompt)] == prompt:
                return answer[min(len(history) - len(prompt), len(answer) - 1)]
        raise AssertionError(f"nobody sent a prompt that begins with {history[:8]}")

    return next_id


def follow_samples(answers: Mapping[History, Sequence[Sequence[int]]], seed: int) -> Callable[[History, int], int]:
    """For `ScriptRunner(by_seed=)`: the answers of requests with that `seed`, n > 1 and a temperature above 0, by sample."""

    def next_id(history: History, row_seed: int) -> int:
        for prompt, samples in answers.items():
            if history[: len(prompt)] == prompt:
                seeds = [(seed + index * SEED_STRIDE) % (MAX_SEED + 1) for index in range(len(samples))]
                return follow({prompt: samples[seeds.index(row_seed)]})(history)
        raise AssertionError(f"nobody sent a prompt that begins with {history[:8]}")

    return next_id


def allowed_id(scripted: int, vocab: int, banned_ids: Iterable[int], slot: SlotRow | None) -> int:
    """The first id from `scripted` on that is neither banned nor impossible by the slot's bias; `NO_ID` stays, and is given for none.

    Biases that only make an id more or less likely are added to the logits of the module's docstring.
    """
    banned = [index for index in set(banned_ids) if 0 <= index < vocab]
    if scripted == NO_ID or (not banned and slot is None):
        return scripted
    logits = -((np.arange(vocab) - scripted) % vocab).astype(np.float64)
    if slot is not None:
        logits += slot.bias
    logits[banned] = -np.inf
    return NO_ID if np.isneginf(logits).all() else int(np.argmax(logits))


def peaked_rows(peaks: np.ndarray, chosen: np.ndarray, vocab: int, *, is_wanted: bool) -> LogprobRows:
    """Log-probabilities of the logits in the module's docstring; zeros if nobody wants them.

    Args:
        peaks: int32 [rows], the scripted ids.
        chosen: int32 [rows]; `NO_ID` counts as the scripted one.
        vocab: of the logits.
        is_wanted: by any row.
    """
    distances = np.arange(min(MAX_LOGPROBS, vocab))
    total = np.log(np.exp(-np.arange(vocab, dtype=np.float64)).sum())
    away = np.where(chosen == NO_ID, 0, (chosen - peaks) % vocab)
    top_ids = ((peaks[:, None] + distances) % vocab).astype(np.int32)
    top = np.broadcast_to(-distances - total, top_ids.shape).astype(np.float32)
    arrays: Any = ((-away - total).astype(np.float32), (away + 1).astype(np.int32), top_ids, top)
    return LogprobRows(*(array * is_wanted for array in arrays))


def script_result(ids: np.ndarray, scripted: np.ndarray, token_ids: list[int], step: Mapping[str, np.ndarray], vocab: int) -> StepResult:
    """What a step gives. In a prompt, the token before is what is likeliest: the logits peak on it.

    Args:
        ids: int32 [seqs], chosen.
        scripted: int32 [seqs], where the logits peak.
        token_ids: of the whole step.
        step: the arrays of the packed step.
        vocab: of the logits.
    """
    before = np.array(token_ids, np.int32)[step["scored_at"]]
    answers = peaked_rows(scripted, ids, vocab, is_wanted=bool((step["num_logprobs"] >= 0).any()))
    prompts = peaked_rows(before, step["scored_next_ids"], vocab, is_wanted=bool((step["scored_num_top"] >= 0).any()))
    # Hidden states are not scripted: the last token of each row, three times.
    pooled = np.repeat(np.array(token_ids, np.float32)[step["sample_tokens"]][:, None], 3, axis=1)
    return StepResult(ids, answers, prompts, pooled)  # type: ignore[arg-type]  # numpy stands for the device's arrays
