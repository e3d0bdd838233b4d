"""Puts the library of CPU kernels into the wheel, where a C++ compiler and jaxlib's headers are; without them the wheel is pure Python."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Compiles `pallas_kernels/*/*.cc`; what is wrong with that is told, and is no failure."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library. An editable installation finds it where it was compiled."""
        root = Path(self.root)
        library = _build(root).find_or_build()
        if library.path is None:
            self.app.display_warning(f"no CPU kernels: {library.missing}")
            return
        if version == "editable" or not library.path.is_relative_to(root):
            return
        build_data["force_include"][str(library.path)] = str(library.path.relative_to(root))
        build_data["pure_python"] = False
        # Any Python may load it: nothing in it is of Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def dependencies(self) -> list[str]:
        """The headers come with jaxlib, and a library is of one version of it: that which is installed with us is the likeliest."""
        if _build(Path(self.root)).compiler() is None:
            return []
        return [wanted.replace("jax", "jaxlib", 1) for wanted in self.metadata.core.dependencies if wanted.startswith("jax<")]


def _build(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_kernels", root / "pallas_kernels" / "native" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
