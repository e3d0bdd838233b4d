"""What `jaxpaged doctor` looks at: one function for each thing that can be wrong with a machine, an installation or a model."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxpaged.config import Config
from jaxpaged.counts import counted
from jaxpaged.errors import JaxpagedError
from jaxpaged.gpu_readings import GpuReading
from jaxpaged.host_limits import available_cpus
from jaxpaged.request import SamplingParams

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "litestar")
LEAST_DISK_BYTES = 2 * 2**30
LEAST_MEMORY_BYTES = 2 * 2**30
SELF_TEST_TOKENS = 32
MESSAGES = ({"role": "user", "content": "Say hello."},)


class Result(msgspec.Struct, frozen=True):
    """One thing that was looked at: ok, warn (works, but not as well as it could) or fail; and what to do where it is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str


class Device(msgspec.Struct, frozen=True):
    """A device of JAX."""

    platform: str
    kind: str


def jax_devices() -> list[Device]:
    """Those that JAX computes on. Raises RuntimeError when JAX cannot start."""
    import jax

    return [Device(device.platform, device.device_kind) for device in jax.devices()]


def versions(installed: Callable[[str], str] = version) -> Iterator[Result]:
    """Python and the packages that all depends on."""
    is_right = (3, 12) <= sys.version_info[:2] < (3, 14)
    text = ".".join(map(str, sys.version_info[:3]))
    yield Result("python", "ok" if is_right else "fail", text if is_right else f"{text}; install Python 3.12 or 3.13")
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {installed(package)}")
        except PackageNotFoundError:
            missing.append(package)
    yield Result(
        "packages", "fail" if missing else "ok", f"missing: {', '.join(missing)}; pip install jaxpaged" if missing else ", ".join(found)
    )


def devices(gpus: Sequence[GpuReading], find: Callable[[], list[Device]] = jax_devices) -> Iterator[Result]:
    """What JAX computes on, and GPUs that it does not see."""
    try:
        found = find()
    except Exception as error:
        yield Result("devices", "fail", f"JAX does not start: {error}")
        return
    names = ", ".join(sorted({f"{device.platform} ({device.kind})" for device in found}))
    is_gpu = any(device.platform in ("gpu", "cuda") for device in found)
    if gpus and not is_gpu:
        yield Result("devices", "warn", f"{names}; JAX does not use the {gpus[0].name}: pip install 'jaxpaged[cuda12]' or [cuda13]")
    else:
        yield Result("devices", "ok", f"{counted(len(found), 'device')}: {names}")
    for gpu in gpus:
        free = gpu.memory_total_bytes - gpu.memory_used_bytes
        is_full = free < gpu.memory_total_bytes / 2
        text = f"{gpu.name}: {_gib(free)} of {_gib(gpu.memory_total_bytes)} free"
        yield Result(f"gpu {gpu.index}", "warn" if is_full else "ok", text + ("; another program holds the rest" if is_full else ""))


def host(root: Path = Path("/")) -> Iterator[Result]:
    """Processors and memory."""
    cpus = available_cpus(root)
    yield Result("cpus", "ok" if cpus > 1 else "warn", counted(cpus, "cpu") + ("" if cpus > 1 else "; the server and the engine share it"))
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        yield Result("memory", "warn", "cannot be read")
        return
    is_enough = available >= LEAST_MEMORY_BYTES
    yield Result(
        "memory", "ok" if is_enough else "warn", f"{_gib(available)} available" + ("" if is_enough else "; the default model needs 2")
    )


def cache_folder(home: Path) -> Iterator[Result]:
    """Where models and compiled programs are kept: rights, room, and what lies there."""
    above = home
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        yield Result("cache folder", "fail", f"{home} cannot be written ({error.strerror}); set JAXPAGED_HOME to a folder that can")
        return
    free = shutil.disk_usage(above).free
    text = f"{home}, {_gib(free)} free" + ("" if home.exists() else ", not made yet")
    is_enough = free >= LEAST_DISK_BYTES
    yield Result("cache folder", "ok" if is_enough else "warn", text + ("" if is_enough else "; models may not fit"))
    others = home.exists() and home.stat().st_mode & 0o022
    if others:
        yield Result("rights", "warn", f"others may write to {home}, and so choose what is loaded; chmod go-w")
    num_programs = sum(1 for _ in (home / "programs").rglob("*")) if (home / "programs").is_dir() else 0
    yield Result("programs", "ok", f"{counted(num_programs, 'file')} of compiled programs" if num_programs else "none compiled yet")


def model_files(config: Config) -> Iterator[Result]:
    """Whether the model is here; nothing is fetched."""
    from jaxpaged.loading.sources import resolve

    offline = msgspec.structs.replace(config.model, offline=True)
    try:
        files = resolve(offline)
    except JaxpagedError as error:
        yield Result("model", "fail", f"{error.message} (jaxpaged pull {config.model.model})")
    else:
        yield Result("model", "ok", f"{files.name} at {files.path}")


def self_test(make: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Result]:
    """Starts the engine, tries tokenizer and template, and lets it answer for some seconds.

    Args:
        make: starts it.
        seconds: no new answer is begun after so long.
        clock: measures.
    """
    began_s = clock()
    try:
        engine = make()
    except JaxpagedError as error:
        yield Result("start", "fail", error.message)
        return
    yield Result("start", "ok", f"in {clock() - began_s:.1f} s")
    try:
        try:
            prompt = engine.get_tokenizer().apply_chat_template(MESSAGES)
            yield Result("chat template", "ok", f"a conversation is {counted(len(prompt), 'token')}")
        except JaxpagedError as error:
            yield Result("chat template", "warn", f"{error.message} (texts can be completed all the same)")
            prompt = "Say hello."
        yield from _answers(engine, prompt, clock, seconds)
    finally:
        engine.close()


def _answers(engine: Any, prompt: Any, clock: Callable[[], float], seconds: float) -> Iterator[Result]:
    params = SamplingParams(temperature=0.0, max_tokens=SELF_TEST_TOKENS, ignore_eos=True)
    began_s, answers = clock(), list[tuple[int, ...]]()
    while not answers or clock() - began_s < seconds:
        try:
            (output,) = engine.generate([prompt], params, use_tqdm=False)
        except JaxpagedError as error:
            yield Result("self test", "fail", error.message)
            return
        answers.append(tuple(output.outputs[0].token_ids))
    spent_s = max(clock() - began_s, 1e-9)
    if len(set(answers)) > 1:
        yield Result("self test", "fail", f"the same question has {counted(len(set(answers)), 'answer')}: memory or device may be faulty")
        return
    rate = sum(map(len, answers)) / spent_s
    yield Result("self test", "ok", f"{counted(len(answers), 'answer')}, all the same, {rate:.1f} tokens/s one after another")


def environment(variables: Sequence[str] = ("JAX_PLATFORMS", "XLA_FLAGS", "LD_LIBRARY_PATH")) -> Iterator[Result]:
    """Variables that change what JAX does; they are often forgotten."""
    found = [f"{name}={os.environ[name][:80]}" for name in variables if os.environ.get(name)]
    if found:
        yield Result("environment", "ok", ", ".join(found))


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
