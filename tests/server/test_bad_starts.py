"""F-c of the goals: starts that cannot succeed are one sentence, before anything is loaded; code of a model is never run."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.served_process import served_process
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]


def night(*values: object) -> object:
    """Parameters of the long run."""
    return pytest.param(*values, marks=pytest.mark.tier("long", area="server"))


def model_folder(folder: Path, spoil: Callable[[Path], None]) -> list[str]:
    """Arguments that name a tiny model with something wrong."""
    write_tiny_llama(folder / "model")
    spoil(folder / "model")
    return ["--model", str(folder / "model")]


def edit_config(**entries: object) -> Callable[[Path], None]:
    """Changes entries of config.json; None takes one away."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        content = {**json.loads(path.read_text()), **entries}
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return spoil


def cut(name: str, size: int) -> Callable[[Path], None]:
    """Cuts a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    """Another content."""
    return lambda folder: (folder / name).write_bytes(content) and None


def gone(name: str) -> Callable[[Path], None]:
    """A file is missing."""
    return lambda folder: (folder / name).unlink()


def only_pickles(folder: Path) -> None:
    """Weights as PyTorch pickles them."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def dangling(folder: Path) -> None:
    """The weights are a link to nowhere."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")


BAD_FOLDERS: dict[str, Callable[[Path], None]] = {
    "no config": gone("config.json"),
    "empty config": replaced("config.json", b""),
    "unknown architecture": edit_config(architectures=["Nothing"], model_type="nothing"),
    "huge": edit_config(hidden_size=10**9),
    "no weights": gone("model.safetensors"),
    "cut weights": cut("model.safetensors", 5000),
    "pickles": only_pickles,
    "link to nowhere": dangling,
    "no tokenizer": gone("tokenizer.json"),
    "config is no JSON": replaced("config.json", b"{nonsense"),
    "config is a list": replaced("config.json", b"[]"),
    "no heads": edit_config(num_attention_heads=0),
    "no layers": edit_config(num_hidden_layers=None),
    "more layers than weights": edit_config(num_hidden_layers=3),
    "empty weights": replaced("model.safetensors", b""),
    "cut header": cut("model.safetensors", 20),
    "tokenizer is no JSON": replaced("tokenizer.json", b"\xff\x00"),
}

BAD_ARGUMENTS: dict[str, list[str]] = {
    "port 70000": ["--port", "70000"],
    "unknown host": ["--host", "no.such.host.invalid"],
    "unknown flag": ["--no-such-flag"],
    "two devices": ["--tensor-parallel-size", "16"],
    "pool too small": ["--cache.memory", "1"],
    "key file": ["--server.api-key-file", "./nowhere"],
    "port x": ["--port", "x"],
    "unknown option": ["--server.portt", "1"],
    "no folder": ["--model", "./nowhere"],
    "certificate": ["--ssl-certfile", "./nowhere"],
    "admin socket": ["--server.admin-socket", "./no/folder/socket"],
}


class Failed:
    """A start that failed: status, what was written, and its own seconds."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXPAGED_")}
        with subprocess.Popen(
            [sys.executable, "-m", "server", "--port", "0", "--log.level", "error", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**kept, "JAXPAGED_HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        ) as process:
            try:
                self.out, self.err = process.communicate(timeout=60)
            finally:
                process.kill()
            self.status = process.returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def check(self, import_s: float) -> None:
        """One sentence, after little more work than imports take."""
        assert self.status in (1, 2), self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.startswith("jaxpaged: ")
        assert self.err.count("\n") <= 8, self.err
        assert self.seconds < 1.5 * import_s + 1


@pytest.fixture(scope="module")
def import_s() -> float:
    """Processor seconds of the imports alone; a limit on the clock would hang on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", "import jaxpaged.async_llm, jaxpaged.build, server.serving, flax.nnx"], check=True, cwd=root)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def some_at_the_gate(faults: dict[str, object], number: int) -> list[object]:
    """The first ones, and the rest in the long run."""
    return [name if index < number else night(name) for index, name in enumerate(faults)]


@pytest.mark.parametrize("fault", some_at_the_gate(dict(BAD_ARGUMENTS), 0))
def test_bad_arguments(tmp_path: Path, import_s: float, fault: str) -> None:
    """F-c."""
    write_tiny_llama(tmp_path / "model")
    given = BAD_ARGUMENTS[fault]
    Failed(tmp_path, given if "--model" in given else ["--model", "./model", *given]).check(import_s)


@pytest.mark.parametrize("fault", some_at_the_gate(dict(BAD_FOLDERS), 9))
def test_bad_model_folders(tmp_path: Path, import_s: float, fault: str) -> None:
    """F-c, F25."""
    Failed(tmp_path, model_folder(tmp_path, BAD_FOLDERS[fault])).check(import_s)


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    """A folder whose config names modules of its own: the model is served, or refused, and they are not imported."""
    model_folder(tmp_path, edit_config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}))
    folder = tmp_path / "model"
    (folder / "evil.py").write_text("open('planted', 'w').close()\n")
    tokenizer = folder / "tokenizer_config.json"
    given = json.loads(tokenizer.read_text()) if tokenizer.exists() else {}
    tokenizer.write_text(json.dumps({**given, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    small = ("--model", str(folder), "--compilation.token-buckets", "16", "--max-num-batched-tokens", "16", "--cache.memory", "1MiB")
    with served_process(tmp_path, *small, SCRIPTED_MODEL="real") as served:
        served.wait_ready()
        answer = served.connect().request("POST", "/v1/completions", b'{"prompt": "x"}', content_type="application/json")
        assert answer.status == 200
    assert not list(tmp_path.rglob("planted"))
