"""`jaxpaged doctor`: what it looks at, on made-up machines, and the command as a whole with a scripted engine."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import examination
from jaxpaged.cli_parser import Parser
from jaxpaged.commands import doctor
from jaxpaged.errors import CheckpointError
from jaxpaged.examination import Device, Result
from jaxpaged.gpu_readings import GpuReading
from tests.cli.scripted_engine import ScriptedEngine

GPU = GpuReading(0, "NVIDIA X", 0.0, 2**30, 80 * 2**30)


def statuses(results: Any) -> dict[str, str]:
    return {result.name: result.status for result in results}


def test_a_package_that_is_missing_is_named() -> None:
    def installed(package: str) -> str:
        if package == "flax":
            raise PackageNotFoundError(package)
        return "1.0"

    results = list(examination.versions(installed))
    assert statuses(results) == {"python": "ok", "packages": "fail"}
    assert "missing: flax" in results[1].text
    assert statuses(examination.versions(lambda package: "1.0")) == {"python": "ok", "packages": "ok"}


def test_a_gpu_that_jax_does_not_use_is_a_warning() -> None:
    cpu, gpu = [Device("cpu", "cpu")], [Device("gpu", "NVIDIA X")]
    assert statuses(examination.devices([], lambda: cpu)) == {"devices": "ok"}
    (first, _) = examination.devices([GPU], lambda: cpu)
    assert first.status == "warn"
    assert "cuda12" in first.text
    assert statuses(examination.devices([GPU], lambda: gpu)) == {"devices": "ok", "gpu 0": "ok"}
    full = GpuReading(0, "NVIDIA X", 0.0, 70 * 2**30, 80 * 2**30)
    assert statuses(examination.devices([full], lambda: gpu)) == {"devices": "ok", "gpu 0": "warn"}

    def broken() -> list[Device]:
        raise RuntimeError("no backend")

    assert statuses(examination.devices([], broken)) == {"devices": "fail"}


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for kib, status in ((8 * 2**20, "ok"), (2**19, "warn")):
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {kib} kB\n")
        assert statuses(examination.host(tmp_path))["memory"] == status
    (tmp_path / "proc" / "meminfo").write_text("nonsense")
    assert statuses(examination.host(tmp_path))["memory"] == "warn"


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert statuses(examination.cache_folder(tmp_path / "a" / "b")) == {"cache folder": "ok", "programs": "ok"}
    assert not (tmp_path / "a").exists(), "looking makes nothing"
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "x").touch()
    tmp_path.chmod(0o777)
    results = list(examination.cache_folder(tmp_path))
    assert statuses(results) == {"cache folder": "ok", "rights": "warn", "programs": "ok"}
    assert results[-1].text.startswith("1 file ")

    def denied(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    (result,) = examination.cache_folder(tmp_path)
    assert result.status == "fail"
    assert "JAXPAGED_HOME" in result.text


class Clock:
    """A second passes at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_self_test_answers_for_some_seconds_and_closes() -> None:
    engine = ScriptedEngine()
    results = list(examination.self_test(lambda: engine, 5.0, Clock()))
    assert statuses(results) == {"start": "ok", "chat template": "ok", "self test": "ok"}
    assert len(engine.prompts) == 5
    assert engine.num_closed == 1
    assert engine.params[0].temperature == 0


def test_an_engine_that_does_not_start_or_says_two_things_fails() -> None:
    def broken() -> ScriptedEngine:
        raise CheckpointError("the file is cut off")

    assert list(examination.self_test(broken, 5.0, Clock())) == [Result("start", "fail", "the file is cut off")]

    class Fickle(ScriptedEngine):
        def generate(self, prompts: Any, params: Any, /, *, use_tqdm: bool) -> Any:
            return super().generate([[*prompts[0], 65 + len(self.prompts)]], params, use_tqdm=use_tqdm)

    engine = Fickle()
    assert statuses(examination.self_test(lambda: engine, 5.0, Clock()))["self test"] == "fail"
    assert engine.num_closed == 1


def command(*words: str) -> Any:
    parser = Parser("jaxpaged doctor", "x")
    doctor.add_arguments(parser)
    return parser.parse(list(words))


@pytest.mark.jax
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(examination, "model_files", lambda config: [Result("model", "ok", "here")])
    engine = ScriptedEngine()
    assert doctor.run(command("--json", "--seconds", "0"), engine.make) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"python", "packages", "cpus", "memory", "cache folder", "devices", "model", "start", "self test"} <= {
        row["name"] for row in told
    }
    assert engine.num_closed == 1
    monkeypatch.setattr(examination, "model_files", lambda config: [Result("model", "fail", "not here")])
    assert doctor.run(command(), engine.make) == 1
    assert "fail model" in capsys.readouterr().out
    assert engine.num_closed == 1, "nothing is started without a model"
