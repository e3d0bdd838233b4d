"""The life of a process that follows, without a device: what signals do, and how it ends."""

import signal
from pathlib import Path

import msgspec
import pytest

from jaxpaged.config import Config, LogConfig
from jaxpaged.distributed import following
from jaxpaged.distributed.following import follow
from jaxpaged.errors import ConfigError, StreamError
from tests.distributed.company import TERMS, company, free_ports, processes


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Nothing is told to the libraries of this process."""
    monkeypatch.setattr(following, "prepare_process", lambda config: None)
    return Config(log=LogConfig(file=str(tmp_path / "log")))


def test_process_0_is_not_there(config: Config) -> None:
    with pytest.raises(StreamError, match="process 0 did not listen"):
        follow(config, processes(1, free_ports(), start_timeout_s=0.05))


def test_process_0_has_other_options(config: Config) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with company() as made, pytest.raises(ConfigError, match="process 0 refuses this one: the mesh is"):
        follow(config, processes(1, made.ports))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_failed_start_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(following, "start_follower", fails)
    monkeypatch.setattr(following, "terms_of", lambda config: TERMS)
    with company() as made:
        with pytest.raises(ConfigError, match="no such model"):
            follow(config, processes(1, made.ports))
        assert made.end.reason() == "process 1 has ended: process 1: no such model"


def test_when_process_0_fails_the_log_says_why(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        assert config.log.file is not None
        assert "dead: process 0 has ended: no room" in Path(config.log.file).read_text()

    monkeypatch.setattr(following, "terms_of", lambda config: TERMS)
    with company() as made:

        def fails_after_process_0(_config: Config, _sinks: object, follower: object) -> None:
            made.joined().fail("no room")
            follower.same("anything", "at all")  # type: ignore[attr-defined]

        monkeypatch.setattr(following, "start_follower", fails_after_process_0)
        with pytest.raises(StreamError, match="process 0 has ended: no room"):
            follow(msgspec.structs.replace(config), processes(1, made.ports), leave)
    assert statuses == [70]


def test_the_first_signal_waits_for_process_0_once_it_serves() -> None:
    said: list[tuple[str, str]] = []
    statuses: list[int] = []
    signals = following._Signals(lambda state, message: said.append((state, message)), statuses.append)
    signals.is_following = True
    signals(signal.SIGTERM, None)
    assert (said, statuses) == ([("draining", "told to stop: process 0 says when")], [])
    signals(signal.SIGINT, None)
    assert statuses == [130]
    loading = following._Signals(lambda *_: None, statuses.append)
    loading(signal.SIGTERM, None)
    assert statuses == [130, 143]
