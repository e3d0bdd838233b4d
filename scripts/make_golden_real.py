"""Makes the greedy texts of further real models in tests/golden/ with transformers and torch, in the environment of make_golden.py.

    /tmp/golden/bin/python scripts/make_golden_real.py smollm2-bf16 SmolLM2-135M-Instruct.Q4_1.gguf
    /tmp/golden/bin/python scripts/make_golden_real.py gemma3-270m gemma-3-270m-q4_k_m.gguf
    /tmp/golden/bin/python scripts/make_golden_real.py qwen2.5-coder-0.5b qwen2.5-coder-0.5b-instruct.gguf

tests/models/real_models.py says where the files come from. Everything is computed in float32 on the CPU; `smollm2-bf16` has its weights
rounded to bfloat16 before. Each file holds prompts, their ids, some greedy ids each (not stopped at end tokens) and the margin of each.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.cases import GOLDEN  # noqa: E402

LONG, SHORT = 32, 12
"""New tokens of each prompt: of SmolLM2, and of the larger ones, of which the prompts in `FEW` are asked."""
FEW = ("capital", "german")
PROMPTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
    "python": 'def fibonacci(n: int) -> int:\n    """Returns the n-th Fibonacci number."""\n',
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "german": "Der schnelle braune Fuchs springt über den faulen Hund, weil",
    "emoji": "I love pizza 🍕 and coffee ☕, but most of all",
    "spaces": "\n\n    - first item\n    - second item\n    -",
}
FAR = "long"
FAR_TOKENS = 700
"""Of one more prompt: past Gemma 3's window of 512."""


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The new ids, and the margin of each: the gap between the two largest logits."""
    cache, ids, margins = None, list(prompt), []
    with torch.no_grad():
        for _ in range(num_tokens):
            new = ids if cache is None else ids[-1:]
            step = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = step.past_key_values
            first, second = torch.topk(step.logits[0, -1], 2)
            ids.append(int(second[0]))
            margins.append(float(first[0] - first[1]))
    return ids[len(prompt) :], margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smollm2-bf16", "gemma3-270m", "qwen2.5-coder-0.5b"))
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    folder, file = args.path.resolve().parent, args.path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    if args.name == "smollm2-bf16":
        model = model.to(torch.bfloat16).to(torch.float32)
    is_small = args.name == "smollm2-bf16"
    ids = {name: tokenizer(prompt)["input_ids"] for name, prompt in PROMPTS.items()}
    text = [token_id for prompt in ids.values() for token_id in prompt]
    ids[FAR] = (text * (FAR_TOKENS // len(text) + 1))[:FAR_TOKENS]
    prompts = []
    for name, token_ids in ids.items():
        if not is_small and name not in ((*FEW, FAR) if args.name.startswith("gemma") else FEW):
            continue
        output, margins = greedy(model, token_ids, LONG if is_small else SHORT)
        print(f"{name}: {len(token_ids)} tokens, least margin {min(margins):.2g}: {tokenizer.decode(output)!r}", flush=True)
        prompts.append(
            {
                "name": name,
                "prompt": PROMPTS.get(name),
                "prompt_token_ids": token_ids,
                "output_token_ids": output,
                "margins": [float(f"{margin:.4g}") for margin in margins],
                "output_text": tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            }
        )
        save(args.path, args.name, prompts)


def save(path: Path, name: str, prompts: list[dict[str, object]]) -> None:
    """Writes the file; after each prompt, so that a slow machine loses little."""
    content = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "prompts": prompts,
    }
    (GOLDEN / f"{name.replace('.', '').replace('-', '_')}_text.json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
