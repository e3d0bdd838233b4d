"""docs/adding-a-model.md against the tree: the last family is spoken of in the files that it names, and in no others."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "adding-a-model.md"
FAMILY = "granite"
NOT_OF_THE_FAMILY = {
    DOC,
    Path(__file__),
    ROOT / "jaxpaged" / "gguf_pre_tokenizers.py",  # llama.cpp's name of a tokenizer
}


def named_in_the_doc() -> set[str]:
    text = DOC.read_text(encoding="utf-8")
    listing = text[text.index("All that it changed") :].split("\n\n")[1]
    return {re.split(r"\s+", line.strip())[0] for line in listing.splitlines()}


def files_of_the_tree() -> list[Path]:
    folders = ("jaxpaged", "pallas_kernels", "server", "tests", "scripts", "configs", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [*found, *(path for path in ROOT.iterdir() if path.is_file())]


def test_the_last_family_changed_the_files_that_the_doc_names_and_no_others() -> None:
    speaking = {
        path.relative_to(ROOT).as_posix()
        for path in files_of_the_tree()
        if path not in NOT_OF_THE_FAMILY
        and (
            FAMILY in path.name or (path.suffix in (".py", ".md", ".toml", ".yaml") and FAMILY in path.read_text(encoding="utf-8").lower())
        )
    }
    assert speaking == named_in_the_doc()


def test_every_file_that_the_doc_names_is_there() -> None:
    named = re.findall(r"`((?:jaxpaged|tests|scripts|configs)/[\w./]+)`", DOC.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
