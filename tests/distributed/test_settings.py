"""Which process of how many: options, LeaderWorkerSet, SLURM, and what contradicts what."""

import os
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.config import Config, DistributedConfig
from jaxpaged.distributed.launchers import first_node
from jaxpaged.distributed.settings import Processes, read_processes
from jaxpaged.errors import ConfigError
from jaxpaged.start import start_engine

SECRET = "0123456789abcdef"
LWS = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
SLURM = {
    "SLURM_JOB_ID": "2050",
    "SLURM_STEP_NODELIST": "gpu[007-009],other",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "0",
}
WHOLE = {"coordinator": "10.0.0.1:8476", "num_processes": 2, "process_id": 1}


def read(env: dict[str, str] | None = None, **options: Any) -> Processes | None:
    return read_processes(DistributedConfig(**{"secret": SECRET, **options}), env or {})


def told(env: dict[str, str] | None = None, **options: Any) -> tuple[str, int, int, int, int]:
    made = read(env, **options)
    assert made is not None
    return made.host, made.coordinator_port, made.steps_port, made.number, made.index


def test_nobody_says_anything() -> None:
    assert read() is None
    assert read_processes(DistributedConfig(), {"PATH": "/bin"}) is None


def test_options_alone() -> None:
    assert told(**WHOLE) == ("10.0.0.1", 8476, 8477, 2, 1)
    assert told(**WHOLE, port=9000) == ("10.0.0.1", 8476, 9000, 2, 1)
    assert told(coordinator="[fd00::1]:80", num_processes=3, process_id=0) == ("fd00::1", 80, 81, 3, 0)
    made = read(coordinator="[fd00::1]:80", num_processes=3, process_id=0)
    assert made is not None
    assert made.coordinator == "[fd00::1]:80"


def test_leader_worker_set() -> None:
    assert told(LWS) == ("llm-0.llm.default", 8476, 8477, 4, 3)
    assert told(LWS, coordinator="10.0.0.1:7000") == ("10.0.0.1", 7000, 7001, 4, 3)
    assert told(LWS, num_processes=4, process_id=3)[3:] == (4, 3)
    assert read({**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}) is None


def test_slurm() -> None:
    assert told(SLURM) == ("gpu007", 61_440 + 2 * (2050 % 2047), 61_441 + 2 * (2050 % 2047), 3, 0)
    assert told({**SLURM, **LWS})[3:] == (4, 3), "LeaderWorkerSet goes first"
    # A batch script alone, and one task of srun: one process.
    assert read({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert read({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu007", "gpu007"),
        ("a,b", "a"),
        ("gpu[001-004]", "gpu001"),
        ("gpu[7,9-12],x", "gpu7"),
        ("a-b.c,gpu[1-2]", "a-b.c"),
        ("login,gpu[1-2]", "login"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_whole_options_and_one_process_do_not_look_at_the_launcher() -> None:
    assert told({**LWS, "LWS_GROUP_SIZE": "x"}, **WHOLE)[3:] == (2, 1)
    assert read(LWS, num_processes=1) is None


@pytest.mark.parametrize(
    ("env", "options", "sentence"),
    [
        ({}, {"num_processes": 2}, "several processes need distributed.coordinator and distributed.process_id, too"),
        ({}, {"coordinator": "a:1"}, "several processes need distributed.num_processes and distributed.process_id, too"),
        ({}, {"num_processes": 1, "process_id": 1}, "distributed.process_id 1 of one process"),
        ({}, {**WHOLE, "process_id": 2}, "process 2 of 2 cannot be"),
        ({}, {**WHOLE, "num_processes": 1025}, "1025 processes cannot be"),
        ({}, {**WHOLE, "coordinator": "10.0.0.1"}, "must be HOST:PORT"),
        ({}, {**WHOLE, "coordinator": "10.0.0.1:0"}, "must be HOST:PORT"),
        ({}, {**WHOLE, "coordinator": "10.0.0.1:99999"}, "must be HOST:PORT"),
        ({}, {**WHOLE, "coordinator": "fd00::1:80"}, "must be HOST:PORT"),
        ({}, {**WHOLE, "coordinator": ":80"}, "must be HOST:PORT"),
        ({}, {**WHOLE, "coordinator": "a:65535"}, "steps cannot go over port 65536"),
        ({}, {**WHOLE, "port": 8476}, "steps cannot go over port 8476"),
        ({}, {**WHOLE, "secret": None}, "need a secret"),
        ({}, {**WHOLE, "secret_file": "x"}, "give either distributed.secret"),
        ({}, {**WHOLE, "secret": "short"}, "16 characters or more"),
        ({}, {**WHOLE, "secret": None, "secret_file": "/no/such/file"}, "cannot read the secret file"),
        (LWS, {"num_processes": 2}, "distributed.num_processes 2 contradicts LeaderWorkerSet, which says 4"),
        (LWS, {"process_id": 0}, "distributed.process_id 0 contradicts LeaderWorkerSet, which says 3"),
        ({**LWS, "LWS_WORKER_INDEX": "4"}, {}, "process 4 of 4 cannot be"),
        ({**LWS, "LWS_GROUP_SIZE": "four"}, {}, "LWS_GROUP_SIZE must be a number"),
        ({**LWS, "LWS_LEADER_ADDRESS": "a b"}, {}, "LWS_LEADER_ADDRESS names no host"),
        ({"LWS_GROUP_SIZE": "2"}, {}, "LeaderWorkerSet has set LWS_GROUP_SIZE and not LWS_LEADER_ADDRESS, LWS_WORKER_INDEX"),
        ({**SLURM, "SLURM_PROCID": ""}, {}, "and not SLURM_PROCID"),
        (SLURM, {"process_id": 2}, "contradicts SLURM, which says 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(env: dict[str, str], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")) as caught:
        read(env, **options)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_the_secrets_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    made = read(**WHOLE, secret=None, secret_file=str(path))
    assert made is not None
    assert made.secret == SECRET.encode()
    assert SECRET not in repr(made)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="is open to others"):
        read(**WHOLE, secret=None, secret_file=str(path))
    path.chmod(0o600)
    path.write_bytes(os.urandom(5000))
    with pytest.raises(ConfigError, match="over 4096 bytes"):
        read(**WHOLE, secret=None, secret_file=str(path))


def test_serve_says_what_is_missing_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*LWS, *SLURM):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["serve", "--port", "0", "--distributed.num-processes", "2"]) == 2
    assert "several processes need distributed.coordinator and distributed.process_id, too" in capsys.readouterr().err


def test_other_programs_are_one_process() -> None:
    with pytest.raises(ConfigError, match=r"distributed\.num_processes 2: several processes are started with `jaxpaged serve` alone"):
        start_engine(Config(distributed=DistributedConfig(num_processes=2)), [])
