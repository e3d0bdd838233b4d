"""Two processes with four devices each serve one model: its ids are those of one device, they end in order, and none outlives the other."""

import http.client
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged.config import MIB
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams
from tests.distributed.company import free_ports
from tests.server import served_process
from tests.server.served_process import PROGRAM, ServedProcess
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.timeout(900)]
SYSTEM = pytest.mark.tier("system")
LONG = pytest.mark.tier("long", area="server")
END_S = 10.0
"""In which a dead process ends the others."""
START_S = 400.0
SIZES = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 16}
PROMPTS = ([5, 6, 7], [9, 300, 8, 41, 77, 12, 3, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102])
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {"17": 4.0, "200": -100}},
    {"temperature": 1.0, "seed": 11},
)


class Pair:
    """Process 0 and process 1."""

    def __init__(self, folder: Path, model: Path, programs: Path) -> None:
        self.ports = ports = free_ports()
        self.admin_port = free_ports()[0]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        flags += [f"--model={model}", "--dtype=float32", "--tensor-parallel-size=8", "--cache.memory=1MiB", "--served-model-name=tiny"]
        flags += ["--compilation.token-buckets=16", f"--compilation.cache-dir={programs}", "--distributed.num-processes=2"]
        flags += [f"--distributed.coordinator=127.0.0.1:{ports[0]}", f"--distributed.port={ports[1]}"]
        environment = {
            "SCRIPTED_MODEL": "real",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
            "JAXPAGED_DISTRIBUTED__SECRET": "a secret of this test",
        }
        self.members: list[ServedProcess] = []
        for index in range(2):
            own = folder / str(index)
            own.mkdir()
            admin = ["--server.admin-port", str(self.admin_port)] if index == 0 else []
            arguments = [*flags, *admin, "--distributed.process-id", str(index)]
            self.members.append(ServedProcess(own, *arguments, command=(sys.executable, str(PROGRAM)), **environment))
        self.leader, self.follower = self.members

    def complete(self, prompt: list[int], **wishes: Any) -> list[int]:
        """The ids of an answer."""
        body = msgspec.json.encode({"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **wishes})
        answer = self.leader.ask("POST", "/v1/completions", body)
        assert answer.status == 200, answer.body
        return list(answer.json["choices"][0]["token_ids"])

    def operate(self, path: str) -> None:
        """An operator's call."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=60)
        connection.request("POST", path)
        assert connection.getresponse().status == 200
        connection.close()

    def check_ended(self) -> None:
        """Nothing is left of either."""
        assert [served.members() for served in self.members] == [[], []]


@contextmanager
def pair(folder: Path, model: Path, programs: Path) -> Iterator[Pair]:
    """Both are gone at the end."""
    made = Pair(folder, model, programs)
    try:
        made.leader.wait_ready()
        yield made
    finally:
        for served in made.members:
            if served.process.poll() is None:
                served.process.send_signal(signal.SIGCONT)
            served.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, layers=1, heads=8, kv_heads=2, head_dim=8)
    return folder


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(served_process, "START_TIMEOUT_S", START_S)
    assert request.config.cache is not None
    return Path(request.config.cache.mkdir("programs-of-processes"))


def of_one_device(model: Path) -> tuple[list[list[int]], list[float]]:
    """The ids of the same requests, in one process on one device, and the embedding of the first prompt."""
    asked = []
    for wishes in WISHES:
        given = {**wishes, "logit_bias": {int(name): bias for name, bias in wishes.get("logit_bias", {}).items()} or None}
        asked.append(SamplingParams(max_tokens=12, ignore_eos=True, **given))
    with LLM(str(model), dtype="float32", cache={"memory": MIB}, compilation={"token_buckets": (16,)}, sinks=[], **SIZES) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [output for params in asked for output in llm.generate(prompts, params, use_tqdm=False)]  # type: ignore[arg-type]
        (vector,) = llm.embed(prompts[0])  # type: ignore[arg-type]
    return [list(output.outputs[0].token_ids) for output in outputs], vector.outputs.embedding


@SYSTEM
def test_ids_are_those_of_one_device_and_both_end_in_order(tmp_path: Path, model: Path, programs: Path) -> None:
    expected, vector = of_one_device(model)
    with pair(tmp_path, model, programs) as made:
        assert [made.complete(prompt, **wishes) for wishes in WISHES for prompt in PROMPTS] == expected
        embedded = made.leader.ask("POST", "/v1/embeddings", msgspec.json.encode({"input": PROMPTS[0]}))
        assert embedded.json["data"][0]["embedding"] == pytest.approx(vector, abs=1e-4)
        listening, _ = made.leader.sockets()
        assert listening >= {made.leader.port, made.admin_port, made.ports[0]}
        assert made.ports[1] not in listening, "nobody else is waited for"
        for level in (1, 2):
            made.operate(f"/sleep?level={level}")
            made.operate("/wake_up")
            assert [made.complete(prompt, **WISHES[0]) for prompt in PROMPTS] == expected[: len(PROMPTS)], f"after a sleep of level {level}"
        # A supervisor tells all at once: who follows goes on until process 0 has answered everybody.
        made.follower.signal(signal.SIGTERM)
        while "process 0 says when" not in made.follower.err:
            time.sleep(0.05)
        assert made.complete(PROMPTS[0], **WISHES[0]) == expected[0]
        made.leader.signal(signal.SIGTERM)
        assert [served.status(60) for served in made.members] == [0, 0], [served.err for served in made.members]
        made.check_ended()


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(1, signal.SIGKILL, marks=SYSTEM),
        pytest.param(0, signal.SIGKILL, marks=SYSTEM),
        pytest.param(1, signal.SIGSTOP, marks=LONG),
        pytest.param(0, signal.SIGSTOP, marks=LONG),
    ],
)
def test_a_dead_process_ends_the_other(tmp_path: Path, model: Path, programs: Path, victim: int, number: signal.Signals) -> None:
    with pair(tmp_path, model, programs) as made:
        stream = made.leader.stream(max_tokens=480)
        os.kill(made.members[victim].process.pid, number)
        survivor = made.members[1 - victim]
        assert survivor.status(END_S) == 70, survivor.err
        assert f"process {victim} " in survivor.err
        if victim == 1:
            stream.read_until(b"engine_dead")
        made.members[victim].process.send_signal(signal.SIGCONT)
        assert made.members[victim].status(END_S) in (70, -signal.SIGKILL)
        made.check_ended()
