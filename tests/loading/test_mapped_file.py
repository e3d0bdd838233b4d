"""A mapped file gives its memory back, and stays readable."""

from pathlib import Path

import numpy as np

from jaxpaged.loading.mapped_file import MappedFile

MIB = 2**20


def _resident_file_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssFile"].split()[0]) * 1024


def test_released_pages_leave_the_process_and_come_back(tmp_path: Path) -> None:
    content = np.arange(64 * MIB // 8, dtype=np.int64)
    content.tofile(tmp_path / "big")
    file = MappedFile(tmp_path / "big")
    before = _resident_file_bytes()
    view = file.view(8, file.size).view(np.int64)
    assert view.sum() == content.sum()
    assert _resident_file_bytes() - before > 60 * MIB
    file.release(8, file.size)
    assert _resident_file_bytes() - before < 4 * MIB
    assert view.sum() == content.sum()
    file.close()
    assert view[-1] == content[-1]


def test_views_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    file = MappedFile(tmp_path / "small")
    view = file.view(1, 3)
    assert view.tobytes() == b"bc"
    assert not view.flags.writeable
    file.release(0, 3)
    assert view.tobytes() == b"bc"
