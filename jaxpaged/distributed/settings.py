"""Which process of how many this one is, and where the first one is: from the options, and what they leave open from the launcher."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxpaged.config import DistributedConfig
from jaxpaged.distributed.launchers import Launched, read_launcher
from jaxpaged.errors import ConfigError

MAX_PROCESSES = 1024
MIN_SECRET_CHARS = 16
_MAX_SECRET_BYTES = 4096


@dataclass(frozen=True)
class Processes:
    """The processes of one engine, as one of them sees them.

    Attributes:
        host: of process 0: what its ports are bound to, and where the others find it.
        coordinator_port: where JAX's coordinator listens.
        steps_port: where process 0 hands out its steps.
        number: of processes.
        index: of this one; 0 schedules.
        secret: which all of them know.
        start_timeout_s: seconds for all of them to come.
    """

    host: str
    coordinator_port: int
    steps_port: int
    number: int
    index: int
    secret: bytes = field(repr=False)
    start_timeout_s: float

    @property
    def coordinator(self) -> str:
        """JAX's spelling of the coordinator's address."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.coordinator_port}"


def read_processes(config: DistributedConfig, env: Mapping[str, str]) -> Processes | None:
    """What the options say, and where they leave something open, LeaderWorkerSet or SLURM; None: one process alone.

    Options that say all three of coordinator, number and index, or that there is one process, leave nothing open.

    Raises:
        ConfigError: something is missing, contradicts something else, or cannot be.
    """
    number, index = config.num_processes, config.process_id
    if number == 1:
        if index:
            raise ConfigError(f"distributed.process_id {index} of one process: it can only be 0", param="distributed.process_id")
        return None
    is_whole = None not in (config.coordinator, number, index)
    launched = None if is_whole else read_launcher(env)
    if launched is not None:
        number = _one_of("num_processes", number, launched, launched.num_processes)
        index = _one_of("process_id", index, launched, launched.process_id)
        if number == 1 and config.coordinator is None:
            return None
    if config.coordinator is None and number is None and index is None:
        return None
    if number is None or index is None or (config.coordinator is None and launched is None):
        given = {"coordinator": config.coordinator, "num_processes": number, "process_id": index}
        missing = [f"distributed.{name}" for name, value in given.items() if value is None]
        raise ConfigError(f"several processes need {' and '.join(missing)}, too", param=missing[0])
    if config.coordinator is not None:
        host, port = _address(config.coordinator)
    else:
        assert launched is not None
        host, port = launched.host, launched.port
    if not 2 <= number <= MAX_PROCESSES:
        raise ConfigError(f"{number} processes cannot be: 2 to {MAX_PROCESSES} can", param="distributed.num_processes")
    if not 0 <= index < number:
        raise ConfigError(f"process {index} of {number} cannot be: they are counted from 0", param="distributed.process_id")
    steps_port = config.port if config.port is not None else port + 1
    if not 1 <= steps_port <= 65535 or steps_port == port:
        raise ConfigError(
            f"steps cannot go over port {steps_port} beside the coordinator's {port}; choose another one", param="distributed.port"
        )
    return Processes(host, port, steps_port, number, index, _secret(config), config.start_timeout_s)


def _one_of(name: str, given: int | None, launched: Launched, said: int) -> int:
    if given is not None and given != said:
        raise ConfigError(
            f"distributed.{name} {given} contradicts {launched.launcher}, which says {said}; leave it out, or give "
            "distributed.coordinator, num_processes and process_id",
            param=f"distributed.{name}",
        )
    return said


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    is_bare_v6 = ":" in host and not text.startswith("[")
    if not colon or not host or is_bare_v6 or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise ConfigError(
            f"distributed.coordinator must be HOST:PORT or [IPV6]:PORT with a port from 1 to 65535, got {text[:80]!r}",
            param="distributed.coordinator",
        )
    return host, int(port)


def _secret(config: DistributedConfig) -> bytes:
    if (config.secret is None) == (config.secret_file is None):
        raise ConfigError(
            "several processes need a secret that all of them know: give either distributed.secret (JAXPAGED_DISTRIBUTED__SECRET) or "
            "distributed.secret_file",
            param="distributed.secret",
        )
    secret = config.secret.encode() if config.secret is not None else _secret_of_file(Path(config.secret_file or "").expanduser())
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(f"the secret of the processes must have {MIN_SECRET_CHARS} characters or more", param="distributed.secret")
    return secret


def _secret_of_file(path: Path) -> bytes:
    param = "distributed.secret_file"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret file {path}: {error.strerror or error}", param=param) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"the secret file {path} is open to others (mode {stat.S_IMODE(mode):03o}); run chmod 600 on it", param=param)
    if len(content) > _MAX_SECRET_BYTES:
        raise ConfigError(f"the secret file {path} is over {_MAX_SECRET_BYTES} bytes", param=param)
    return content
