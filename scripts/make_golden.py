"""Makes the files of SmolLM2 in tests/golden/ with Hugging Face transformers and torch, which the project itself never needs.

In an environment of its own (the versions are those that made the files in the tree):

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 ml_dtypes==0.6.0
    /tmp/golden/bin/python scripts/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf
    /tmp/golden/bin/python scripts/make_golden_tiny.py    # those of the tiny models: needs no file

The GGUF file is the one of the default model; after `jaxpaged pull smollm2-135m` it lies in the cache folder. Files:

    smollm2_text.json       prompts, their token ids, 64 greedy ids each (not stopped at end tokens) and the margin of each: the gap between
                            the two largest logits, which tells a tie from a fault
    smollm2_logits.npz      logits of every 16th id, and the logsumexp over all ids: after some prompts, and far into a long text with
                            the file's rotary base and with 10000
    smollm2_scores.json     log-likelihoods of two-choice items, and log-probabilities of the tokens of some prompts with the 5 likeliest
    smollm2_beams.json      what beam search with 4 beams finds for ten of the prompts (stopped at the end token), and how close it was
    smollm2_embeddings.npz  for some of the prompts, the mean of the last hidden states after the final norm, and the last of them

Everything is computed in float32 on the CPU.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.cases import GOLDEN  # noqa: E402

NUM_NEW_TOKENS = 64
ID_STRIDE = 16
FAR_POSITIONS = (1, 64, 1024, 4096)
LOGIT_PROMPTS = ("capital", "python", "german", "chat")
OTHER_THETA = 10_000.0
SCORED_PROMPTS = ("capital", "german", "emoji", "chat", "long")
NUM_LIKELIEST = 5
BEAM_PROMPTS = ("capital", "story", "python", "chat", "chat-turns", "arithmetic", "json", "german", "list", "special")
BEAM_WIDTH, NUM_BEAM_TOKENS = 4, 32
EMBEDDED_PROMPTS = ("one-letter", "capital", "python", "japanese", "chat-turns", "long")

PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
    "python": 'def fibonacci(n: int) -> int:\n    """Returns the n-th Fibonacci number."""\n',
    "chat": [{"role": "user", "content": "What is the capital of Japan? Answer in one sentence."}],
    "chat-turns": [
        {"role": "system", "content": "You are a patient teacher of physics."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red light."},
        {"role": "user", "content": "And why is the sunset red?"},
    ],
    "arithmetic": "12 + 30 = 42\n7 * 8 = 56\n100 - 58 =",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "german": "Der schnelle braune Fuchs springt über den faulen Hund, weil",
    "japanese": "東京は日本の首都であり、",
    "russian": "Москва - столица",
    "emoji": "I love pizza 🍕 and coffee ☕, but most of all",
    "one-letter": "A",
    "spaces": "\n\n    - first item\n    - second item\n    -",
    "shouting": "ATTENTION PASSENGERS: THE TRAIN TO",
    "html": "<html>\n<head><title>Paged attention</title></head>\n<body>\n",
    "list": "Ten things to take on a long hike:\n1. Water\n2.",
    "poem": "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n",
    "sql": "SELECT customers.name, COUNT(orders.id) FROM customers",
    "special": "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "long": (
        "The history of the lighthouse goes back to the fires that were lit on hilltops to guide ships into a harbour. Before the "
        "development of clearly defined ports, mariners were guided by such fires, and placing the fire on a platform improved its "
        "visibility, so that towers came to be built. In antiquity the lighthouse served as an entrance marker to ports rather than "
        "as a warning of reefs and headlands, unlike many modern ones. The most famous of them was the Pharos of Alexandria in Egypt, "
        "which fell in a series of earthquakes. The intact Tower of Hercules at A Coruña in Spain gives an idea of what these "
        "buildings looked like. Coins from Alexandria, Ostia in Italy and Laodicea in Syria also show lighthouses. The modern era of "
        "lighthouse building began at the turn of the eighteenth century, as trade across the oceans grew and steel, concrete and "
        "better lenses became available. In short, the most important reasons why lighthouses were built are"
    ),
}


TWO_CHOICES: list[tuple[str, str, str]] = [
    ("Question: Is the sun a star?\nAnswer:", " yes", " no"),
    ("Question: Can fish ride bicycles?\nAnswer:", " yes", " no"),
    ("The man turned on the faucet. As a result,", " the toilet filled with water.", " water flowed from the spout."),
    ("The girl found a bug in her cereal. As a result,", " she poured milk in the bowl.", " she lost her appetite."),
    ("The capital of Italy is", " Rome.", " Oslo."),
    ("2 + 2 =", " 4", " 5"),
    ("To open a jar that is stuck,", " run hot water over the lid.", " put the jar upside down in the freezer for a week."),
    ("She put the letter into the envelope and", " licked the flap to seal it.", " ate the soup with a fork."),
    ("def add(a, b):\n    return", " a + b", " a - b"),
    ("Der Himmel ist", " blau.", " verheiratet."),
    ("Water freezes at zero degrees", " Celsius.", " Fahrenheit."),
    ("The opposite of hot is", " cold", " warm"),
    ("My body cast a shadow over the grass because ", "the sun was rising.", "the grass was cut."),
    ("The woman tolerated her friend's difficult behavior because  ", "her friend was going through a hard time.", "they were late."),
    ("A triangle has three", " sides", " wheels"),
    ("Q: What do bees make?\nA:", " Honey", " Concrete"),
    ("日本の首都は", "東京です。", "パリです。"),
    ("The emoji for pizza is", " 🍕", " 🚗"),
    ("If all cats are animals and Tom is a cat, then Tom is", " an animal.", " a spoon, a table and, on Sundays, the king of Spain."),
    ("Once upon a", " time", " clock"),
]
"""A context and two ways to go on, as evaluation harnesses ask for them."""


def load_smollm2(path: Path) -> transformers.LlamaForCausalLM:
    """The model as transformers reads the GGUF file, checked bit for bit against `dequantized`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    state = model.state_dict()
    names = set(state) - {"lm_head.weight"}
    for name, tensor in dequantized(path, model.config):
        assert torch.equal(state[name], tensor), f"transformers reads {name} differently"
        names.remove(name)
    assert not names, names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def dequantized(path: Path, config: transformers.LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, float32 values) of each tensor; rows of q and k back in Hugging Face's order."""
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    inner = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    inner |= {f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"} | {"attn_output": "self_attn.o_proj"}
    inner |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stem = tensor.name.removesuffix(".weight")
        if stem in top:
            name = top[stem]
        else:
            _, layer, kind = stem.split(".")
            name = f"model.layers.{layer}.{inner[kind]}"
            if kind in heads:
                rows, columns = values.shape
                values = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        yield f"{name}.weight", torch.from_numpy(np.array(values, np.float32))


def logits_at(model: transformers.PreTrainedModel, token_ids: list[int], positions: tuple[int, ...]) -> np.ndarray:
    """Float32 logits [positions, vocab] of one forward pass over the whole text."""
    hidden = model.model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    return model.lm_head(hidden[list(positions)]).numpy()


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float], np.ndarray]:
    """Returns the new ids, the margin of each, and the logits of the first; checked against one pass over the whole text."""
    cache, ids, margins, steps = None, list(prompt), [], []
    for _ in range(NUM_NEW_TOKENS):
        new = ids if cache is None else ids[-1:]
        step = model(input_ids=torch.tensor([new]), cache=cache, use_cache=True, logits_to_keep=1)
        cache = step.cache
        logits = step.logits[0, -1]
        first, second = torch.topk(logits, 2).values.tolist()
        ids.append(int(torch.argmax(logits)))
        margins.append(first - second)
        steps.append(logits.numpy())
    whole = logits_at(model, ids[:-1], tuple(range(len(prompt) - 1, len(ids) - 1)))
    assert np.abs(whole - np.stack(steps)).max() < 1e-3
    return ids[len(prompt) :], margins, steps[0]


def thinned(logits: np.ndarray) -> dict[str, np.ndarray]:
    """What is kept of logits [rows, vocab]."""
    return {"logits": logits[:, ::ID_STRIDE], "logsumexp": np.logaddexp.reduce(logits.astype(np.float64), axis=-1)}


def make_smollm2(path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_smollm2(path)
    prompts, first_logits = [], {}
    for name, prompt in PROMPTS.items():
        if isinstance(prompt, str):
            token_ids = tokenizer(prompt)["input_ids"]
        else:
            token_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        output, margins, first_logits[name] = greedy(model, token_ids)
        print(f"{name}: {len(token_ids)} tokens, least margin {min(margins):.2g}: {tokenizer.decode(output)!r}", flush=True)
        kept_margins = [float(f"{margin:.4g}") for margin in margins]
        text = tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        prompts.append(
            {
                "name": name,
                "prompt": prompt,
                "prompt_token_ids": token_ids,
                "output_token_ids": output,
                "margins": kept_margins,
                "output_text": text,
            }
        )
    logits = {f"first.{key}": value for key, value in thinned(np.stack([first_logits[name] for name in LOGIT_PROMPTS])).items()}

    text = [token_id for prompt in prompts for token_id in (*prompt["prompt_token_ids"], *prompt["output_token_ids"])]
    text = (text * (FAR_POSITIONS[-1] // len(text) + 1))[: FAR_POSITIONS[-1] + 1]
    thetas = {"theta": model.config.rope_parameters["rope_theta"], "other_theta": OTHER_THETA}
    for key, theta in thetas.items():
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        logits |= {f"{key}.{kept}": value for kept, value in thinned(logits_at(model, text, FAR_POSITIONS)).items()}
    save_npz(GOLDEN / "smollm2_logits.npz", logits)
    content = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__, "gguf": gguf_version()},
        "logit_prompts": LOGIT_PROMPTS,
        "id_stride": ID_STRIDE,
        "far_positions": FAR_POSITIONS,
        **thetas,
        "prompts": prompts,
    }
    write_json(GOLDEN / "smollm2_text.json", content)


def next_logprobs(model: transformers.PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """Float64 log-probabilities [tokens - 1, vocab]: row i is of what follows token i."""
    logits = logits_at(model, token_ids, tuple(range(len(token_ids) - 1))).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def scored(model: transformers.PreTrainedModel, tokenizer: Any, context: str, continuation: str) -> dict[str, Any]:
    """One choice: its tokens, their log-likelihood, and whether a greedy answer begins with them."""
    spaces = context[len(context.rstrip()) :]
    whole = tokenizer(context + continuation)["input_ids"]
    first = len(tokenizer(context.removesuffix(spaces))["input_ids"])
    rows, own = next_logprobs(model, whole)[first - 1 :], whole[first:]
    logprobs = rows[np.arange(len(own)), own]
    is_greedy = bool((rows.argmax(axis=-1) == own).all())
    return {"text": continuation, "token_ids": own, "logprob": round(float(logprobs.sum()), 6), "is_greedy": is_greedy}


def make_scores(path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_smollm2(path)
    items, prompts = [], []
    for context, *choices in TWO_CHOICES:
        items.append({"context": context, "choices": [scored(model, tokenizer, context, choice) for choice in choices]})
        print(f"{context!r}: {[choice['logprob'] for choice in items[-1]['choices']]}", flush=True)
    for name in SCORED_PROMPTS:
        prompt = PROMPTS[name]
        if isinstance(prompt, str):
            token_ids = tokenizer(prompt)["input_ids"]
        else:
            token_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        rows = next_logprobs(model, token_ids)
        likeliest = np.argsort(-rows, axis=-1, kind="stable")[:, :NUM_LIKELIEST]
        prompts.append(
            {
                "name": name,
                "logprobs": rows[np.arange(len(rows)), token_ids[1:]].round(5).tolist(),
                "top_ids": likeliest.tolist(),
                "top": np.take_along_axis(rows, likeliest, axis=-1).round(5).tolist(),
            }
        )
    content = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "items": items, "prompts": prompts}
    write_json(GOLDEN / "smollm2_scores.json", content)


def beams(model: transformers.PreTrainedModel, prompt: list[int], eos_token_id: int) -> dict[str, object]:
    """The answers of a beam search, best first, with their scores, and the smallest difference of scores that any choice hung on."""
    gaps: list[float] = []
    choose = model._get_top_k_continuations

    def choose_and_look(**given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, sequences, indices = choose(**given)
        ids = sequences[0, :, given["cur_len"]].tolist()
        values = scores[0].tolist()
        going_on = [value for value, token_id in zip(values, ids, strict=True) if token_id != eos_token_id]
        if len(going_on) > BEAM_WIDTH:
            gaps.append(going_on[BEAM_WIDTH - 1] - going_on[BEAM_WIDTH])
        if eos_token_id in ids[BEAM_WIDTH - 1 : BEAM_WIDTH + 1] or given["cur_len"] == len(prompt) + NUM_BEAM_TOKENS - 1:
            gaps.append(values[BEAM_WIDTH - 1] - values[BEAM_WIDTH])
        return scores, sequences, indices

    model._get_top_k_continuations = choose_and_look
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=BEAM_WIDTH,
        num_return_sequences=BEAM_WIDTH,
        do_sample=False,
        max_new_tokens=NUM_BEAM_TOKENS,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    del model._get_top_k_continuations
    scores = found.sequences_scores.tolist()
    gaps += [better - worse for better, worse in zip(scores, scores[1:], strict=False)]
    answers = []
    for sequence, score in zip(found.sequences.tolist(), scores, strict=True):
        ids = sequence[len(prompt) :]
        length = ids.index(eos_token_id) + 1 if eos_token_id in ids else len(ids)
        answers.append({"token_ids": ids[:length], "score": float(f"{score:.6g}")})
    return {"answers": answers, "margin": float(f"{min(gaps):.4g}")}


def make_searches(path: Path) -> None:
    """The files of beam search and embeddings; the prompts' ids are those of `smollm2_text.json`."""
    eos_token_id = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).eos_token_id
    model = load_smollm2(path)
    text = json.loads((GOLDEN / "smollm2_text.json").read_text(encoding="utf-8"))
    ids = {prompt["name"]: prompt["prompt_token_ids"] for prompt in text["prompts"]}
    embeddings = {}
    for name in EMBEDDED_PROMPTS:
        hidden = model.model(input_ids=torch.tensor([ids[name]]), use_cache=False).last_hidden_state[0]
        embeddings |= {f"{name}.mean": hidden.mean(0).numpy(), f"{name}.last": hidden[-1].numpy()}
    save_npz(GOLDEN / "smollm2_embeddings.npz", embeddings)
    prompts = []
    for name in BEAM_PROMPTS:
        prompts.append({"name": name, **beams(model, ids[name], eos_token_id)})
        print(prompts[-1]["name"], prompts[-1]["margin"], flush=True)
    content = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__, "gguf": gguf_version()},
        "beam_width": BEAM_WIDTH,
        "max_tokens": NUM_BEAM_TOKENS,
        "eos_token_id": eos_token_id,
        "prompts": prompts,
    }
    write_json(GOLDEN / "smollm2_beams.json", content)


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size} bytes")


def write_json(path: Path, content: dict[str, object]) -> None:
    # One line a prompt, so that a change of one shows as a change of one.
    prompts = content.pop("prompts")
    head = json.dumps(content, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    path.write_text(f'{head}, "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--only", choices=("smollm2", "scores", "searches"), help="make a part of the files")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, however many cores there are
    GOLDEN.mkdir(exist_ok=True)
    with torch.inference_mode():
        if args.only in (None, "smollm2"):
            make_smollm2(args.gguf)
        if args.only in (None, "scores"):
            make_scores(args.gguf)
        if args.only in (None, "searches"):
            make_searches(args.gguf)


if __name__ == "__main__":
    main()
