"""Models of the Hugging Face hub, through huggingface_hub (imported late; it knows the token, the proxy, the mirror and offline mode)."""

import errno
import glob
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from jaxpaged.errors import DownloadError, JaxpagedError, ModelNotFoundError
from jaxpaged.loading.cache_folder import Staged, Staging, StoredFile
from jaxpaged.loading.disk import remove_tree, require_space
from jaxpaged.loading.file_choice import INDEX_SUFFIX, FileChoice
from jaxpaged.loading.network import host_of, is_reachable
from jaxpaged.loading.progress import Meter, Progress, folder_bytes, folder_growth
from jaxpaged.loading.wheel_contents import file_sha256

REACH_TIMEOUT_S = 3.0
DEFAULT_REVISION = "main"
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
"""Told by whoever owns the folder; everything else is the network's."""


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a repository; large ones have a SHA-256, the others git's own id of their content."""

    name: str
    num_bytes: int
    sha256: str | None
    git_id: str | None


class HubRepository(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


def describe(repo: str, revision: str | None, token: str | None) -> HubRepository:
    """Ask the hub for the commit that `revision` (its main branch if None) is now, and for the files in it.

    Raises:
        DownloadError: offline, no network (within 5 s), refused. ModelNotFoundError: no such repository or revision.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise DownloadError(f"{repo} was never pulled and offline mode is on; unset HF_HUB_OFFLINE, or give a local folder")
    if not is_reachable([constants.ENDPOINT], REACH_TIMEOUT_S):
        raise DownloadError(
            f"no network: {repo} is neither a folder here nor pulled yet, and the hub ({host_of(constants.ENDPOINT)}) cannot be reached;"
            " check the network and the proxy, or give a local folder"
        )
    with _hub_errors(repo, revision):
        found = HfApi(token=token, library_name="jaxpaged").model_info(repo, revision=revision, files_metadata=True)
    if not found.sha:
        raise DownloadError(f"the hub names no commit for {repo}")
    files = tuple(
        HubFile(
            name=file.rfilename,
            num_bytes=file.size or 0,
            sha256=file.lfs.sha256 if file.lfs is not None else None,
            git_id=file.blob_id,
        )
        for file in found.siblings or ()
    )
    return HubRepository(repo=repo, commit=found.sha, files=files)


def stage_repository(found: HubRepository, choice: FileChoice, staging: Staging, token: str | None, progress: Progress) -> Staged:
    """Fetch the chosen files but those that an earlier try of the same commit completed, and check each against the hub's hash.

    Raises:
        DownloadError: no space, the connection broke, or a file is not the one that the hub described.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    for left in staging.files.rglob("*.incomplete"):  # huggingface_hub goes on from whole files only, and never uses these again
        left.unlink()
    wanted = [file for file in found.files if file.name in choice.files]
    total_bytes = sum(file.num_bytes for file in wanted)
    with Meter(progress, f"pulling {found.repo}", total_bytes) as meter:
        require_space(staging.folder, total_bytes - min(folder_bytes(staging.files), total_bytes), f"pulling {found.repo}")
        with folder_growth(meter, staging.files), _hub_errors(found.repo, found.commit):
            snapshot_download(
                found.repo,
                revision=found.commit,
                local_dir=staging.files,
                allow_patterns=[glob.escape(file.name) for file in wanted],
                token=token,
                library_name="jaxpaged",
                tqdm_class=NoBar,
            )
        meter.update(total_bytes)
    stored = tuple(_checked(file, staging.files / file.name, found.repo) for file in wanted)
    remove_tree(staging.files / ".cache")
    return Staged(kind=choice.kind, files=stored, source=source_label(found))


def source_label(found: HubRepository) -> str:
    """The repository and its commit, for the record."""
    return f"hub:{found.repo}@{found.commit}"


def find_in_hub_cache(repo: str, revision: str | None) -> Path | None:
    """The snapshot that other programs have left in the hub's own cache, if all its weights are there. It is only read."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    wanted = revision or DEFAULT_REVISION
    try:
        reference = folder / "refs" / wanted
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
        snapshot = folder / "snapshots" / commit
        names = {path.name for path in snapshot.iterdir() if path.is_file()}
        for index in (name for name in names if name.endswith(INDEX_SUFFIX)):
            weight_map = msgspec.json.decode((snapshot / index).read_bytes(), type=_Index).weight_map
            if not names.issuperset(weight_map.values()):
                return None
    except (OSError, ValueError):
        return None
    return snapshot if any(name.endswith((".safetensors", ".gguf")) for name in names) else None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _checked(file: HubFile, path: Path, repo: str) -> StoredFile:
    try:
        num_bytes = path.stat().st_size
    except OSError:
        raise DownloadError(f"{file.name} of {repo} did not arrive: the connection broke; try again to go on from there") from None
    sha256 = file_sha256(path)
    is_right = sha256 == file.sha256 if file.sha256 is not None else file.git_id is None or _git_id(path, num_bytes) == file.git_id
    if num_bytes != file.num_bytes or not is_right:
        path.unlink()
        raise DownloadError(f"{file.name} of {repo} is not what the hub described (size or hash differ); it was thrown away, try again")
    return StoredFile(path=file.name, num_bytes=num_bytes, sha256=sha256)


def _git_id(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
    digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """One sentence for whatever huggingface_hub and the HTTP client below it (which differs between versions) raise."""
    from huggingface_hub import errors

    named = repo if revision is None else f"{repo} at {revision}"
    try:
        yield
    except JaxpagedError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(f"{repo} is gated: accept its terms on its hub page and give a token (hf_token or HF_TOKEN)") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo} has no revision {revision!r} on the hub", param="revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {repo}, and no folder here is called so; if it is private, give a token (hf_token or HF_TOKEN)"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repo} is no name the hub allows") from error
    except errors.HfHubHTTPError as error:
        raise DownloadError(f"the hub refused {named}: HTTP {error.response.status_code}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise DownloadError(f"could not fetch {named} from the hub ({type(error).__name__}); check the network and try again") from error
