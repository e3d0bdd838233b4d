"""What SCRIPT says: functions from a history to the next id, and the logits that peak on it.

The logits at each place are 0 for the scripted id, -1 for the id after it, -2 for the next and so on, around the vocabulary. So a
scripted id that may not be chosen (an end token before `min_tokens`, a bad word, an id outside of `allowed_token_ids`) gives way to
the first one after it that may, and the likeliest ids are those that follow the scripted one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxpaged.logprobs import StepResult
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


def live_rows(step: Mapping[str, np.ndarray]) -> list[int]:
    """Rows of a packed step that have a history."""
    return np.flatnonzero(step["kv_lens"]).tolist()


def scored_tokens(
    step: Mapping[str, np.ndarray], histories: Sequence[History], scripted_id: Callable[[History, np.ndarray], int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For `script_result`: what follows tokens of prompts, where the logits peak there, and how many likeliest ids are wanted."""
    num_top = step["scored_num_top"]
    scripted, live = np.zeros_like(num_top), live_rows(step)
    for index in np.flatnonzero(num_top >= 0).tolist():
        place = int(step["scored_at"][index])
        row = next(row for row in live if step["cu_q_lens"][row] <= place < step["cu_q_lens"][row + 1])
        history = histories[live.index(row)][: int(step["positions"][place]) + 1]
        scripted[index] = scripted_id(history, step["seed"][row])
    return step["scored_next_ids"], scripted, num_top


def pooled_rows(step: Mapping[str, np.ndarray], histories: Sequence[History]) -> np.ndarray:
    """For `script_result`: the hidden state of a token is (its id, 1, 0.5), and here are their sums over each row's history."""
    pooled = np.zeros((len(step["kv_lens"]), 3), np.float32)
    for row, history in zip(live_rows(step), histories, strict=True):
        pooled[row] = sum(history), len(history), 0.5 * len(history)
    return pooled


def script_result(
    ids: np.ndarray,
    scripted: np.ndarray,
    num_logprobs: np.ndarray,
    vocab: int,
    prompt: tuple[np.ndarray, np.ndarray, np.ndarray],
    pooled: np.ndarray,
) -> StepResult:
    """What a step gives: the ids, and the log-probabilities of the logits in the module's docstring if a row wants any.

    Args:
        ids: int32 [seqs], chosen.
        scripted: int32 [seqs], where the logits peak.
        num_logprobs: int32 [seqs], of the packed step.
        vocab: ids lie below it.
        prompt: of `scored_tokens`.
        pooled: of `pooled_rows`.
    """
    rows = script_rows(ids, scripted, num_logprobs, vocab)
    return StepResult(ids, rows, script_rows(*prompt, vocab), pooled)  # type: ignore[arg-type]  # numpy stands for the device's arrays


def script_rows(ids: np.ndarray, scripted: np.ndarray, num_logprobs: np.ndarray, vocab: int) -> np.ndarray:
    """Columns of log-probabilities of `ids` and of the likeliest ones; zeros if no row wants any."""
    num_top = min(MAX_LOGPROBS, vocab)
    distances = np.arange(num_top)
    total = np.log(np.exp(-np.arange(vocab, dtype=np.float64)).sum())
    is_wanted = bool((num_logprobs >= 0).any())
    away = np.where(ids == NO_ID, 0, (ids - scripted) % vocab) * is_wanted
    top_ids = ((scripted[:, None] + distances) % vocab * is_wanted).astype(np.int32)
    top = np.broadcast_to((-distances - total) * is_wanted, top_ids.shape).astype(np.float32)
    floats = np.column_stack([((-away - total) * is_wanted).astype(np.float32), top])
    return np.column_stack([floats.view(np.int32), ((away + 1) * is_wanted).astype(np.int32), top_ids])
