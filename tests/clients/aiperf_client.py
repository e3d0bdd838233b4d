"""`python aiperf_client.py BASE_URL MODEL TOKENIZER_FOLDER`: 16 streams of 12 tokens, 4 at once, from NVIDIA's load generator.

Offline it finds tokenizers in the hub's cache alone, so the folder is laid there as such a cache has it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

base_url, model, tokenizer = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    revision = "0" * 40
    cached = Path(folder) / "hub" / "models--local--tokenizer"
    shutil.copytree(tokenizer, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    out = Path(folder) / "out"
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model, "--url", base_url.removesuffix("/v1")]
    command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", "local/tokenizer", "--concurrency", "4"]
    command += ["--request-count", "16", "--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "12"]
    command += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", str(out)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "HF_HOME": folder}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    told = json.loads((out / "profile_export_aiperf.json").read_text())
assert told["is_complete"]
assert told["error_summary"] == []
assert told["completed_request_count"]["avg"] == 16
assert told["total_usage_completion_tokens"]["avg"] == 16 * 12
assert told["usage_discrepancy_count"]["avg"] == 0
print("passed")
