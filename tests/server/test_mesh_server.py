"""A server whose model lies on a mesh, two copies of two devices each: it answers, tells figures of each copy, and stops as any other."""

import re
import signal
from pathlib import Path

import pytest

from tests.server.served_process import ServedProcess, completion, served_process
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]

COMPILE_TIMEOUT_S = 240.0
PROMPTS = ("hello", "the other prompt, which is longer", "a third", "and one more")


def by_engine(served: ServedProcess, name: str) -> dict[str, float]:
    """A figure under vLLM's name: engine -> value, of all other labels together."""
    text, told = served.ask("GET", "/metrics").body.decode(), dict[str, float]()
    for engine, value in re.findall(rf'^vllm:{name}{{.*engine="(.*?)".*}} (.*)$', text, re.MULTILINE):
        told[engine] = told.get(engine, 0) + float(value)
    return told


def test_a_model_on_a_mesh(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    model, mesh, cache = tmp_path / "tiny", tmp_path / "mesh.yaml", pytestconfig.cache
    model.mkdir()
    write_tiny_llama(model)
    mesh.write_text("axes:\n  data: 2\n  tensor: 2\n")
    assert cache is not None
    small = ("--max-num-batched-tokens", "16", "--compilation.token-buckets", "16", "--cache.memory", "1MiB", "--max-num-seqs", "8")
    options = ("--model", str(model), "--served-model-name", "tiny", "--parallel.mesh", str(mesh))
    programs = ("--compilation.cache-dir", str(cache.mkdir("programs")))
    fake = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "SCRIPTED_MODEL": "real"}
    with served_process(tmp_path, *options, *small, *programs, **fake) as served:
        served.wait_ready(COMPILE_TIMEOUT_S)
        assert re.search(r"^  copies +2, each with all of this$", served.out, re.MULTILINE)
        assert served.ask("GET", "/health").json == {"status": "ready"}
        body = completion(24, prompt=list(PROMPTS), logprobs=1)
        whole = served.ask("POST", "/v1/completions", body).json
        assert whole["usage"]["completion_tokens"] == 4 * 24
        chat = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": true}'
        assert served.ask("POST", "/v1/chat/completions", chat).json["usage"]["completion_tokens"] == 4
        tokens = by_engine(served, "generation_tokens_total")
        assert sorted(tokens) == ["0", "1"]
        assert sum(tokens.values()) == 4 * 24 + 4
        assert min(tokens.values()) >= 24, "both copies were given some"
        assert by_engine(served, "request_success_total").keys() == {"0", "1"}
        assert by_engine(served, "num_requests_running") == {"0": 0, "1": 0}
        assert by_engine(served, "cache_config_info") == {"0": 1, "1": 1}
        streams = [served.stream(200) for _ in range(4)]
        served.signal(signal.SIGTERM)
        for stream in streams:
            assert stream.read().body.endswith(b"data: [DONE]\n\n")
        assert served.status(30) == 0
        assert served.members() == []
        assert "Traceback" not in served.err
