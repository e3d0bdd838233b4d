"""What launchers of several processes tell in the environment: LeaderWorkerSet (Kubernetes) and SLURM (srun)."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxpaged.errors import ConfigError
from jaxpaged.option_values import shorten

LWS_PORT = 8476
"""Of process 0's pod, where LeaderWorkerSet names its host alone; JAX's own choice on Kubernetes."""
SLURM_FIRST_PORT, SLURM_NUM_PORTS = 61_440, 2_048
"""Jobs of one node take pairs of ports by their number, as JAX does."""

_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


class Launched(NamedTuple):
    """What a launcher says: who it is, where process 0 is, how many there are and which of them this one is."""

    launcher: str
    host: str
    port: int
    num_processes: int
    process_id: int


def read_launcher(env: Mapping[str, str]) -> Launched | None:
    """What the environment says; None where no launcher has started this process. LeaderWorkerSet goes before SLURM.

    Raises:
        ConfigError: a launcher's variables are there in part, or hold what is no number or no name of a host.
    """
    if any(name in env for name in _LWS):
        host, size, index = _all_of("LeaderWorkerSet", _LWS, env)
        return Launched("LeaderWorkerSet", _host(_LWS[0], host), LWS_PORT, _number(_LWS[1], size), _number(_LWS[2], index))
    if _SLURM[1] in env and _SLURM[2] in env:  # a step of srun; a batch script alone has neither
        job, nodes, size, index = _all_of("SLURM", _SLURM, env)
        port = SLURM_FIRST_PORT + 2 * (_number(_SLURM[0], job) % (SLURM_NUM_PORTS - 1))
        return Launched("SLURM", _host(_SLURM[1], first_node(nodes)), port, _number(_SLURM[2], size), _number(_SLURM[3], index))
    return None


def first_node(nodes: str) -> str:
    """The first of SLURM's node list: "gpu[007-009,12],other" -> "gpu007"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    first = re.match(r"\d+", rest)
    return head + (first[0] if first else "")


def _all_of(launcher: str, names: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise ConfigError(
            f"{launcher} has set {', '.join(name for name in names if env.get(name))} and not {', '.join(missing)}; give "
            "distributed.coordinator, num_processes and process_id, or distributed.num_processes 1 for one process",
            param=missing[0],
        )
    return [env[name] for name in names]


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{name} must be a number, got {shorten(repr(text))}", param=name)
    return int(text)


def _host(name: str, text: str) -> str:
    if not _HOST.fullmatch(text):
        raise ConfigError(f"{name} names no host: {shorten(repr(text))}", param=name)
    return text
