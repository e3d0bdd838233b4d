"""`python llm_client.py BASE_URL MODEL`: the command `llm` with a model of its `extra-openai-models.yaml`, as its documentation says."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

base_url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    card = {"model_id": "mine", "model_name": model, "api_base": base_url, "api_key_name": "mine"}
    entries = [card, {**card, "model_id": "mine-plain", "completion": True}]
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(entries))
    (Path(folder) / "keys.json").write_text(json.dumps({"mine": "EMPTY"}))

    def llm(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "LLM_USER_PATH": folder}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = ("Say hello.", "--system", "You are brief.", "-o", "temperature", "0", "-o", "max_tokens", "12")
    streamed = llm("-m", "mine", *asked)
    assert streamed.strip()
    assert llm("-m", "mine", "--no-stream", *asked) == streamed
    assert llm("-c", "Again.", "-o", "temperature", "0", "-o", "max_tokens", "12").strip()
    logged = json.loads(llm("logs", "--json", "-n", "0"))
    assert [entry["model"] for entry in logged] == ["mine"] * 3
    assert llm("-m", "mine-plain", "One, two,", "-o", "temperature", "0", "-o", "max_tokens", "5").strip()
print("passed")
