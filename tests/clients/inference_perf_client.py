"""`python inference_perf_client.py BASE_URL MODEL TOKENIZER_FOLDER`: 16 streams in 8 seconds, from the load generator of Kubernetes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

base_url, model, tokenizer = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "out"
    config = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": model, "base_url": base_url.removesuffix("/v1"), "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer},
        "data": {
            "type": "random",
            "input_distribution": {"min": 20, "max": 80, "mean": 50, "std_dev": 10, "total_count": 20},
            "output_distribution": {"min": 4, "max": 16, "mean": 10, "std_dev": 3, "total_count": 20},
        },
        "load": {"type": "constant", "stages": [{"rate": 2, "duration": 8}], "num_workers": 1},
        "storage": {"local_storage": {"path": str(out)}},
    }
    (Path(folder) / "config.yaml").write_text(json.dumps(config))
    command = [str(Path(sys.executable).with_name("inference-perf")), "--config_file", str(Path(folder) / "config.yaml")]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    told = json.loads((out / "summary_lifecycle_metrics.json").read_text())
assert told["successes"]["count"] == 16
assert told["failures"]["count"] == 0
print("passed")
