"""Writes a GGUF file's model as folders float32/ and bfloat16/ for vLLM and transformers: `to_safetensors.py FILE FOLDER`.

Runs in the environment of transformers that setup.sh makes, not in ours.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    fields = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
