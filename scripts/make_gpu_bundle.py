"""Makes dist/gpu-bundle: the project's wheel and the few packages that the engine needs beside jax, flax and numpy, as locked.

    make gpu-bundle

For machines with a GPU where nothing can be installed: `python scripts/gpu_check.py --wheels dist/gpu-bundle`, on CPython 3.12 and x86-64.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("flatbuffers", "jaxtyping", "jinja2", "markupsafe", "msgspec", "tokenizers", "wadler-lindig")
MAX_BYTES = 10_000_000


def locked(text: str) -> str:
    """The lines of a lock that are of `PACKAGES`, hashes included."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    own = [block for block in blocks if block.partition("==")[0] in PACKAGES]
    missing = set(PACKAGES) - {block.partition("==")[0] for block in own}
    if missing:
        raise ValueError(f"the lock does not have {', '.join(sorted(missing))}")
    return "".join(own)


def main() -> int:
    folder = ROOT / "dist" / "gpu-bundle"
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(locked((ROOT / "requirements" / "base.lock").read_text(encoding="utf-8")), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--require-hashes"]
        target = ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux2014_x86_64", "--platform=manylinux_2_28_x86_64"]
        subprocess.run([*pip, *target, "--dest", str(folder), "--requirement", str(requirements)], check=True)
    # Pure Python, without the library of CPU kernels: it is for another machine.
    pure = {**os.environ, "HATCH_BUILD_NO_HOOKS": "true"}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], check=True, cwd=ROOT, env=pure)
    wheels = sorted(folder.glob("*.whl"))
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size:10,}  {wheel.name}")
    print(f"{num_bytes:10,}  bytes in all, at most {MAX_BYTES:,}")
    return int(num_bytes > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
