"""JAX over several processes: before its first array, and at the end."""

import contextlib

import jax

from jaxpaged.distributed.company import Company
from jaxpaged.errors import EngineDeadError

HEARTBEAT_TIMEOUT_S = 15
"""JAX ends a process itself (by a signal, without a word) when another was silent for so long: the last resort, where our own threads
cannot run. It must be more than twice what those take."""
SHUTDOWN_TIMEOUT_S = 3


def start_jax(company: Company) -> None:
    """Joins JAX's processes; collectives on CPUs go over gloo.

    Raises:
        EngineDeadError: JAX has devices already, or its coordinator cannot be reached.
    """
    processes = company.processes
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    host = company.bind_host
    bound = None if host is None else f"{f'[{host}]' if ':' in host else host}:{processes.coordinator_port}"
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.number,
            processes.index,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(processes.start_timeout_s)),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
            coordinator_bind_address=bound,
        )
    except (RuntimeError, ValueError) as error:
        raise EngineDeadError(f"JAX could not join its processes: {str(error).partition(chr(10))[0]}") from error


def stop_jax() -> None:
    """Leaves them, so that none of them takes this one for dead. All must call it at about the same time; raises nothing."""
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
