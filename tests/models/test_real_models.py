"""Greedy text of real weights equals that of transformers; and of mixtures made of SmolLM2, that of SmolLM2."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import ModelConfig
from jaxpaged.convert_model import convert
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.sources import resolve
from tests.equality import TIE_MARGIN
from tests.models.cases import GOLDEN
from tests.models.real_models import GEMMA3_270M, QWEN25_CODER_05B, joined, write_as_mixture, write_in_bfloat16

pytestmark = [pytest.mark.jax, pytest.mark.real]

MOST_MIXTURE_TOKENS = 24


class Prompt(msgspec.Struct, frozen=True):
    """What transformers says to one prompt; `prompt` is None where its ids were put together."""

    name: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    margins: list[float]
    prompt: Any = None


def prompts_of(name: str) -> list[Prompt]:
    content = json.loads((GOLDEN / f"{name}_text.json").read_bytes())
    return msgspec.convert(content["prompts"], list[Prompt])


def check(model: Path, prompts: list[Prompt], *, tokenizer: Path | None = None, most_tokens: int = 1000) -> None:
    """All prompts at once; answers may differ only from a tie on."""
    other = {} if tokenizer is None else {"tokenizer": str(tokenizer)}
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 128}
    length = min(most_tokens, len(prompts[0].output_token_ids))
    with LLM(str(model), dtype="float32", max_model_len=1024, scheduler=scheduler, compilation={"token_buckets": (4, 128)}, **other) as llm:
        for prompt in prompts:
            if isinstance(prompt.prompt, str):
                assert llm.get_tokenizer().encode(prompt.prompt) == prompt.prompt_token_ids, prompt.name
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        outputs = llm.generate([prompt.prompt_token_ids for prompt in prompts], params, use_tqdm=False)
    ties = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        differing = [at for at, (one, due) in enumerate(zip(ours, prompt.output_token_ids, strict=False)) if one != due]
        if differing:
            assert prompt.margins[differing[0]] < TIE_MARGIN, (prompt.name, differing[0], prompt.margins[differing[0]])
            ties.append((prompt.name, differing[0]))
    print(f"{model.name}: {length * len(prompts)} tokens, ties {ties}")
    assert len(ties) <= 1


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """Where joined files are kept."""
    assert request.config.cache is not None
    return Path(request.config.cache.mkdir("real-models"))


@pytest.mark.tier("long", area="models")
def test_smollm2_in_bfloat16_safetensors(smollm2_path: Path, tmp_path: Path) -> None:
    write_in_bfloat16(smollm2_path, tmp_path / "smollm2-bf16")
    check(tmp_path / "smollm2-bf16", prompts_of("smollm2_bf16"), tokenizer=smollm2_path)


@pytest.mark.tier("long", area="models")
def test_smollm2_in_bfloat16_from_orbax(smollm2_path: Path, tmp_path: Path) -> None:
    config = ModelConfig(model=str(smollm2_path), dtype="bfloat16")
    convert(config, resolve(config), tmp_path / "smollm2-orbax", SilentProgress())
    check(tmp_path / "smollm2-orbax", prompts_of("smollm2_bf16"))


@pytest.mark.tier("long", area="models")
@pytest.mark.parametrize(("experts", "are_slices"), [(4, True), (2, False)], ids=["slices", "copies"])
def test_a_mixture_made_of_smollm2_answers_as_the_dense_model(experts: int, are_slices: bool, smollm2_path: Path, tmp_path: Path) -> None:
    write_as_mixture(smollm2_path, tmp_path / "mixture", experts=experts, are_slices=are_slices)
    check(tmp_path / "mixture", prompts_of("smollm2")[:8], tokenizer=smollm2_path, most_tokens=MOST_MIXTURE_TOKENS)


@pytest.mark.tier("long", area="models")
def test_gemma_3_270m(folder: Path) -> None:
    check(joined(GEMMA3_270M, folder), prompts_of("gemma3_270m"))


@pytest.mark.tier("long", area="models")
def test_qwen_2_5_coder_0_5b(folder: Path) -> None:
    check(joined(QWEN25_CODER_05B, folder), prompts_of("qwen25_coder_05b"))
