"""The golden files of SmolLM2, as `scripts/make_golden.py` made them with Hugging Face transformers in float32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "golden"


class GoldenPrompt(NamedTuple):
    """A prompt and its greedy continuation, which goes on past end tokens.

    Attributes:
        name: a word for it.
        prompt: a text, or the messages of a conversation.
        prompt_token_ids: its ids; of a conversation, up to where the assistant speaks.
        output_token_ids: the ids that follow.
        margins: of each of them, the gap between the two largest logits.
        output_text: the text of these ids without control tokens.
    """

    name: str
    prompt: str | list[dict[str, str]]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    margins: list[float]
    output_text: str


class Golden(NamedTuple):
    """Everything that is kept of SmolLM2.

    Attributes:
        prompts: by name.
        logit_prompts: names of those whose first logits are kept.
        id_stride: logits of every such id are kept.
        far_positions: where in `far_text` logits are kept.
        thetas: prefix of the keys in `logits` -> rotary base they were made with.
        logits: "first", "theta" or "other_theta" and "logits" or "logsumexp" -> array.
    """

    prompts: Mapping[str, GoldenPrompt]
    logit_prompts: list[str]
    id_stride: int
    far_positions: list[int]
    thetas: Mapping[str, float]
    logits: Mapping[str, np.ndarray]

    @property
    def far_text(self) -> list[int]:
        """Token ids up to the last of `far_positions`: all prompts with their outputs, over and over."""
        once = [token_id for prompt in self.prompts.values() for token_id in (*prompt.prompt_token_ids, *prompt.output_token_ids)]
        length = self.far_positions[-1] + 1
        return (once * (length // len(once) + 1))[:length]

    def logit_error(self, logits: np.ndarray, key: str, rows: slice = slice(None)) -> float:
        """The largest difference of logits [rows, vocab] from those kept under `key`, in any kept id or in the sum over all ids."""
        sums = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
        kept = np.abs(logits[:, :: self.id_stride] - self.logits[f"{key}.logits"][rows]).max()
        return float(max(kept, np.abs(sums - self.logits[f"{key}.logsumexp"][rows]).max()))


def read_golden() -> Golden:
    """Reads both files."""
    content: dict[str, Any] = json.loads((FOLDER / "smollm2_text.json").read_text(encoding="utf-8"))
    prompts = [GoldenPrompt(**{name: prompt[name] for name in GoldenPrompt._fields}) for prompt in content["prompts"]]
    with np.load(FOLDER / "smollm2_logits.npz") as file:
        logits = dict(file)
    return Golden(
        prompts={prompt.name: prompt for prompt in prompts},
        logit_prompts=content["logit_prompts"],
        id_stride=content["id_stride"],
        far_positions=content["far_positions"],
        thetas={key: content[key] for key in ("theta", "other_theta")},
        logits=logits,
    )


class GoldenChoice(NamedTuple):
    """One way to go on: `logprob` in float64 of float32 logits, `is_greedy`: a greedy answer begins so."""

    text: str
    token_ids: list[int]
    logprob: float
    is_greedy: bool


class GoldenItem(NamedTuple):
    """A context and two ways to go on."""

    context: str
    choices: list[GoldenChoice]


class PromptScores(NamedTuple):
    """Of every token of a prompt but the first: its log-probability, and the likeliest ids with theirs."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]


def read_scores() -> tuple[list[GoldenItem], dict[str, PromptScores]]:
    """Two-choice items, and log-probabilities of prompts by their names in `Golden.prompts`."""
    content: dict[str, Any] = json.loads((FOLDER / "smollm2_scores.json").read_text(encoding="utf-8"))
    items = [GoldenItem(item["context"], [GoldenChoice(**choice) for choice in item["choices"]]) for item in content["items"]]
    return items, {prompt["name"]: PromptScores(prompt["logprobs"], prompt["top_ids"], prompt["top"]) for prompt in content["prompts"]}
