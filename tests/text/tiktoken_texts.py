"""Texts for Qwen 1's tokenizer; read by the tests and by the golden script, which has the package `tiktoken`."""

import random
from pathlib import Path

from tests.tiny_model import CORPUS

GOLDEN = Path(__file__).parent.parent / "golden"
TINY_TIKTOKEN, TIKTOKEN_IDS = GOLDEN / "tiny.tiktoken", GOLDEN / "tiktoken_ids.json"

# From Qwen's tokenization_qwen.py, written down once more and not taken from the code that is tested.
QWEN_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))]

TRAINED_ON = (
    *CORPUS,
    "aaaa aaa aaaaaaaa abab ababab",
    "Grüße aus Köln, 你好世界 你好",
    "I'll they've it's DON'T 1234 5678",
    "x = [1, 2]\n\n\tif y:\r\n",
)
"""The vocabulary's 144 longer tokens come from here."""


def _mixed(seed: int) -> str:
    """A text of pieces that meet in odd ways."""
    source = random.Random(seed)
    pieces = [
        "aaa",
        "ab",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'ll",
        "'S",
        "12",
        "٣",
        "é",
        "e\u0301",
        "你好",
        "😀",
        "<|im_end|>",
        "<|im",
        "the ",
        "(x)",
        "\u00a0",
        "ß",
    ]
    return "".join(source.choice(pieces) for _ in range(source.randrange(1, 40)))


TEXTS = (
    "",
    "Hello, world!",
    *TRAINED_ON,
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|extra_204|><|extra_205|>",
    *(_mixed(seed) for seed in range(60)),
)
