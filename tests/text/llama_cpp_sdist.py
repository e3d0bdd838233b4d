"""The templates and tokenizer vectors inside the source distribution of llama-cpp-python, from the index that pip is set up for."""

import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

PACKAGE = "llama-cpp-python"
WANTED = re.compile(r".*/vendor/llama\.cpp/models/(templates/[^/]+\.jinja|ggml-vocab-[^/]+)$")


def fetch(folder: Path) -> Path:
    """Downloads the newest one, about 80 MB, and unpacks what is wanted into `folder`, flat."""
    index = os.environ.get("PIP_INDEX_URL") or _pip("config", "get", "global.index-url") or _default_index()
    page = f"{index.rstrip('/')}/{PACKAGE}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        links = re.findall(r'href="([^"#]+\.tar\.gz)', answer.read().decode())
    newest = max(links, key=lambda link: [int(part) for part in re.findall(r"\d+", link.rpartition("-")[2].removesuffix(".tar.gz"))])
    archive = folder / "sdist.tar.gz"
    urllib.request.urlretrieve(urljoin(page, newest), archive)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and WANTED.match(member.name):
                member.name = Path(member.name).name
                tar.extract(member, folder, filter="data")
    archive.unlink()
    return folder


def _pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _default_index() -> str:
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
