"""Makes the files of the tiny models in tests/golden/, in the environment that `scripts/make_golden.py` describes.

    <architecture>_logits.npz   logits of the tiny models in tests/models/cases.py; `--only qwen2` makes one of these files
    bert_hidden.npz             hidden states of the encoder in tests/models/encoder_cases.py; `--only bert`
    tiny.tiktoken, tiktoken_ids.json    a vocabulary trained by the package `tiktoken`, and the ids that it gives texts; `--only tiktoken`
    rope_tables.json            rotary frequencies of the configs in tests/models/rope_cases.py; `--only rope`

Everything is computed in float32 on the CPU.
"""

import argparse
import base64
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.cases import FAMILY_CASES, VARIANT_CASES, Case  # noqa: E402
from tests.models.encoder_cases import GOLDEN_HIDDEN, LENGTHS, VOCAB, prompt_of, told  # noqa: E402
from tests.models.rope_cases import GOLDEN_ROPE, ROPE_CASES  # noqa: E402
from tests.text.tiktoken_texts import QWEN_CONTROLS, QWEN_CUT, TEXTS, TIKTOKEN_IDS, TINY_TIKTOKEN, TRAINED_ON  # noqa: E402
from tests.tiny_families import write_as_qwen2, write_tiny_bert  # noqa: E402

_SUFFIX = "_logits.npz"


def logits_of(case: Case) -> np.ndarray:
    """Logits [positions, vocab] of one forward pass over the whole prompt."""
    with tempfile.TemporaryDirectory() as folder:
        case.write(folder, **case.options)
        if case.architecture == "QWenLMHeadModel":
            write_as_qwen2(Path(folder))
        # Gemma 2's soft caps and gpt-oss' sinks are in the eager attention alone; torch's grouped products refuse odd widths.
        implementations = {"attn_implementation": "eager" if case.name.startswith(("gemma", "gptoss")) else "sdpa"}
        implementations["experts_implementation"] = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **implementations).eval()
        logits = model(input_ids=torch.tensor([case.token_ids]), use_cache=False).logits[0, list(case.positions)].numpy()
    print(f"{case.name}: {logits.shape}, rms {np.sqrt(np.mean(logits**2)):.3f}", flush=True)
    return logits


def make_logits(path: Path, cases: list[Case]) -> None:
    np.savez_compressed(path, **{case.name: logits_of(case) for case in cases})
    print(f"{path}: {path.stat().st_size} bytes")


def make_hidden() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_bert(folder, vocab_size=VOCAB)
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        hidden = {str(length): model(input_ids=torch.tensor([prompt_of(length)])).last_hidden_state[0].numpy() for length in LENGTHS}
    np.savez_compressed(GOLDEN_HIDDEN, **{length: told(array) for length, array in hidden.items()})
    print(f"{GOLDEN_HIDDEN}: {GOLDEN_HIDDEN.stat().st_size} bytes")


def make_tiktoken() -> None:
    import tiktoken
    from tiktoken._educational import bpe_train

    ranks = bpe_train("\n".join(TRAINED_ON), 400, QWEN_CUT)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    TINY_TIKTOKEN.write_text("".join(lines), encoding="ascii")
    controls = {name: len(ranks) + index for index, name in enumerate(QWEN_CONTROLS)}
    encoding = tiktoken.Encoding("tiny", pat_str=QWEN_CUT, mergeable_ranks=ranks, special_tokens=controls)
    ids = {text: encoding.encode(unicodedata.normalize("NFC", text), allowed_special="all") for text in TEXTS}
    TIKTOKEN_IDS.write_text(json.dumps(ids, ensure_ascii=True, indent=0), encoding="ascii")
    print(f"{len(ranks)} tokens, {sum(map(len, ids.values()))} ids of {len(ids)} texts")


def make_rope_tables() -> None:
    tables = {}
    for name, (config, length) in ROPE_CASES.items():
        hf_config = transformers.LlamaConfig(**config)
        kind = hf_config.rope_parameters["rope_type"]
        frequencies, magnitude = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"), seq_len=length)
        tables[name] = {"frequencies": frequencies.tolist(), "magnitude": magnitude}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(table)}" for name, table in tables.items())
    GOLDEN_ROPE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{GOLDEN_ROPE}: {GOLDEN_ROPE.stat().st_size} bytes")


def main() -> None:
    by_file: dict[Path, list[Case]] = {}
    for case in (*FAMILY_CASES, *VARIANT_CASES):
        by_file.setdefault(case.golden_path, []).append(case)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--only", choices=("rope", "bert", "tiktoken", *(path.name.removesuffix(_SUFFIX) for path in by_file)), help="make one of the files"
    )
    only = parser.parse_args().only
    torch.set_num_threads(1)  # sums in one order, however many cores there are
    with torch.inference_mode():
        for path, cases in by_file.items():
            if only in (None, path.name.removesuffix(_SUFFIX)):
                make_logits(path, cases)
        if only in (None, "bert"):
            make_hidden()
        if only in (None, "tiktoken"):
            make_tiktoken()
        if only in (None, "rope"):
            make_rope_tables()


if __name__ == "__main__":
    main()
