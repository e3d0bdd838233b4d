"""Beam search written a second time, as Hugging Face transformers does it, over any function that gives log-probabilities."""

from collections.abc import Callable, Set
from typing import NamedTuple

import numpy as np

FAR = -1e9

type Table = Callable[[tuple[int, ...]], np.ndarray]
"""Log-probabilities [vocab] of the id after an answer's beginning."""


class Reference(NamedTuple):
    """What the search below finds: ids and scores, best first, and the number of steps that it took."""

    answers: list[tuple[int, ...]]
    scores: list[float]
    num_steps: int


def reference_search(table: Table, *, width: int, max_tokens: int, ends: Set[int], penalty: float) -> Reference:
    """As Hugging Face transformers 5.24 does it: arrays of fixed size, with very low scores for what is not there.

    `running` are W beginnings, of which all but the first are nothing at the start; each step looks at the best K = W * max(2, ends + 1)
    extensions, of which the best W that do not end run on, and those among the best W that do may replace finished ones.
    """
    running: list[tuple[int, ...]] = [()] * width
    running_scores = np.array([0.0] + [FAR] * (width - 1))
    finished: list[tuple[int, ...]] = [()] * width
    finished_scores, is_finished = np.full(width, FAR), np.zeros(width, bool)
    length = 0
    while True:
        scores = np.concatenate([table(ids) + score for ids, score in zip(running, running_scores, strict=True)])
        vocab = len(scores) // width
        best = np.argsort(-scores, kind="stable")[: width * max(2, len(ends) + 1)]
        candidates = [(*running[index // vocab], int(index % vocab)) for index in best]
        length += 1
        hits = np.array([ids[-1] in ends or length == max_tokens for ids in candidates])

        in_first = np.arange(len(best)) < width
        new_scores = np.where(hits & in_first, scores[best] / length**penalty, FAR)
        merged = np.concatenate([finished_scores, new_scores])
        keep = np.argsort(-merged, kind="stable")[:width]
        everybody = finished + candidates
        finished, finished_scores = [everybody[index] for index in keep], merged[keep]
        is_finished = np.concatenate([is_finished, hits & in_first])[keep]

        run_scores = np.where(hits, scores[best] + FAR, scores[best])
        keep = np.argsort(-run_scores, kind="stable")[:width]
        running, running_scores = [candidates[index] for index in keep], run_scores[keep]
        may_improve = not is_finished.all() or running_scores[0] / length**penalty > finished_scores.min()
        if hits.all() or not may_improve:
            return Reference(finished, finished_scores.tolist(), length)
