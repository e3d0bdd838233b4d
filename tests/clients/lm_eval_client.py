"""`python lm_eval_client.py BASE_URL MODEL`: a task of lm-eval through `local-completions`, with the server's own tokenizer.

Prints JSON lines: the context, the continuation, its log-probability, whether it is the likeliest.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = (
    ("The capital of France is", ["Paris", "Rome", "a kind of cheese"], 0),
    ("Water is made of hydrogen and", ["sand", "oxygen"], 1),
    ("One, two, three,", ["four", "seven", "blue"], 0),
    ("Die Katze heißt „Mäxchen“ und sie", ["schläft", "🐈"], 0),
    ("The opposite of hot is", ["warm", "cold"], 1),
)
TASK = {
    "task": "small",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}

base_url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    rows = [json.dumps({"question": question, "choices": choices, "answer": answer}) for question, choices, answer in QUESTIONS]
    (Path(folder) / "rows.jsonl").write_text("\n".join(rows))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(Path(folder) / "rows.jsonl")}, "cache_dir": folder}}
    (Path(folder) / "small.yaml").write_text(json.dumps(task))
    told = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{base_url}/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 2,
            "max_length": 400,
        },
        tasks=["small"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        batch_size=2,
        bootstrap_iters=0,
    )
assert told["results"]["small"]["acc,none"] >= 0.6
for sample in told["samples"]["small"]:
    for argument, (logprob, is_greedy) in zip(sample["arguments"], sample["filtered_resps"], strict=True):
        print(json.dumps([*argument, float(logprob), is_greedy]))
