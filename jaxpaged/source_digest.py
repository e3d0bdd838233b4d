"""The code of this project as one word, for the names of files that are made by it."""

import functools
import hashlib
from pathlib import Path

_PACKAGES = ("jaxpaged", "pallas_kernels")


@functools.cache
def source_digest() -> str:
    """Changes with any line of the code that loads, converts or traces a model."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
