"""XLA really uses as many threads as `cpu.threads` says: counted in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]

ROOT = Path(__file__).parent.parent

PROGRAM = """
import collections, os, sys
from jaxpaged.host_limits import apply_cpu_threads, jax_has_started
apply_cpu_threads(int(sys.argv[1]))
import jax, jax.numpy as jnp
assert not jax_has_started()
jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
assert jax_has_started()
names = collections.Counter(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
print(names["tf_XLAEigen"])
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_xla_has_that_many_compute_threads(threads: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert int(done.stdout) == threads
