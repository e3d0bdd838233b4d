"""How many CPUs this process may use, and how JAX is told."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged import host_limits
from jaxpaged.errors import ConfigError
from jaxpaged.host_limits import (
    GPU_FRACTION_VARIABLE,
    MALLOC_VARIABLES,
    THREAD_VARIABLES,
    apply_cpu_threads,
    apply_gpu_fraction,
    available_cpus,
    host_memory,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


V2 = {"proc/self/cgroup": "0::/kube/pod/box\n"}
V1 = {"proc/self/cgroup": "12:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n"}


@pytest.mark.usefixtures("sixteen_cpus")
@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 16),
        (V2, 16),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "max 100000\n"}, 16),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "400000 100000\n"}, 4),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "150000 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "10000 100000\n"}, 1),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "max 100000\n", "sys/fs/cgroup/kube/cpu.max": "300000 100000\n"}, 3),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "800000 100000\n", "sys/fs/cgroup/kube/pod/cpu.max": "200000 100000\n"}, 2),
        # Inside a container the mount is the group itself, and the path is the host's.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/cpu.max": "500000 100000\n"}, 5),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "600000 100000\n"}, 6),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "garbage\n"}, 16),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "100000 0\n"}, 16),
        ({**V2, "sys/fs/cgroup/kube/pod/box/cpu.max": "6400000 100000\n"}, 16),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n"}, 2),
        ({"proc/self/cgroup": "nonsense\n::\n"}, 16),
    ],
)
def test_quotas_of_both_cgroup_versions_and_every_level(files: dict[str, str], cpus: int, tmp_path: Path) -> None:
    assert available_cpus(tree(tmp_path, files)) == cpus


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert available_cpus(tree(tmp_path, {**V2, "sys/fs/cgroup/cpu.max": "400000 100000\n"})) == 2


def test_this_machine_has_a_number() -> None:
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


@pytest.fixture
def jax_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "jax_has_started", lambda: False)


@pytest.mark.usefixtures("jax_not_started", "sixteen_cpus")
def test_threads_are_set_for_every_library() -> None:
    env: dict[str, str] = {"OMP_NUM_THREADS": "2"}
    assert apply_cpu_threads(3, env) == 3
    assert env == dict.fromkeys(THREAD_VARIABLES, "3")


@pytest.mark.usefixtures("jax_not_started")
def test_what_the_user_set_is_kept_unless_the_option_says_otherwise() -> None:
    env = {"NPROC": "5", "OMP_NUM_THREADS": "2"}
    assert apply_cpu_threads(None, env) == 5
    assert env == {**dict.fromkeys(THREAD_VARIABLES, "5"), "OMP_NUM_THREADS": "2"}
    empty: dict[str, str] = {"NPROC": "many"}
    assert apply_cpu_threads(None, empty) == available_cpus()


def test_after_the_start_of_jax_it_is_too_late_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "jax_has_started", lambda: True)
    env = {"NPROC": "5"}
    assert apply_cpu_threads(None, env) == 5
    assert apply_cpu_threads(5, env) == 5
    with pytest.raises(ConfigError, match=r"cpu\.threads 3 comes too late: JAX has started in this process with 5"):
        apply_cpu_threads(3, env)
    apply_gpu_fraction(0.5, env)
    assert env == {"NPROC": "5"}


@pytest.mark.usefixtures("jax_not_started")
def test_the_gpu_fraction_is_set_unless_the_user_has() -> None:
    env: dict[str, str] = {}
    apply_gpu_fraction(0.92, env)
    assert env == {GPU_FRACTION_VARIABLE: "0.92"}
    apply_gpu_fraction(0.5, env)
    assert env == {GPU_FRACTION_VARIABLE: "0.92"}


def test_looking_whether_jax_has_started_imports_nothing() -> None:
    code = "import sys\nfrom jaxpaged.host_limits import jax_has_started\nassert not jax_has_started()\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})


COUNT_NEW_PAGES = """
import ctypes, resource, sys
from jaxpaged.host_limits import keep_freed_blocks

assert keep_freed_blocks() == (sys.argv[1] == "kept")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 64 * 1024 * 1024
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_large_blocks_are_used_again_unless_the_user_says_otherwise() -> None:
    own = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    for env in (own, {**own, "MALLOC_TRIM_THRESHOLD_": "131072"}):
        is_kept = env is own and platform.libc_ver()[0] == "glibc"
        command = [sys.executable, "-c", COUNT_NEW_PAGES, "kept" if is_kept else "not"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        assert not is_kept or int(done.stdout) < 20
        assert is_kept or platform.libc_ver()[0] != "glibc" or int(done.stdout) >= 32  # a huge page is touched once


MEMINFO = {"proc/meminfo": "MemTotal:       4194304 kB\nMemFree: 1 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 4 * 2**30),
        ({**MEMINFO, **V2, "sys/fs/cgroup/kube/pod/box/memory.max": "max\n"}, 4 * 2**30),
        ({**MEMINFO, **V2, "sys/fs/cgroup/kube/pod/memory.max": "1073741824\n"}, 2**30),
        ({**MEMINFO, **V2, "sys/fs/cgroup/memory.max": "9999999999999\n"}, 4 * 2**30),
        ({**MEMINFO, **V1, "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "2147483648\n"}, 2 * 2**30),
        ({**MEMINFO, **V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "nonsense"}, 4 * 2**30),
        ({"proc/meminfo": "MemTotal: much\n", **V2, "sys/fs/cgroup/memory.max": "4096"}, 4096),
    ],
)
def test_memory_is_the_machines_or_what_a_cgroup_allows(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    tree(tmp_path, files)
    assert host_memory(tmp_path) == expected
