"""The encoder whose hidden states are compared with those of transformers; read by the tests and by the golden script."""

from pathlib import Path

import numpy as np

VOCAB = 131
LENGTHS = (1, 2, 17, 64, 127)
GOLDEN_HIDDEN = Path(__file__).parent.parent / "golden" / "bert_hidden.npz"


def prompt_of(length: int) -> list[int]:
    """Ids drawn evenly, others for each length."""
    return np.random.default_rng(length).integers(VOCAB, size=length).tolist()


def told(hidden: np.ndarray) -> np.ndarray:
    """What is kept of the hidden states [tokens, embed]: the first, the middle, the last, and the mean of all."""
    return np.stack([hidden[0], hidden[len(hidden) // 2], hidden[-1], hidden.mean(0)])
