"""Goal: a recording that cannot be written is refused in one line. Method: real files and folders; that validation asks is
tested with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.recording.format import Header
from sglang_hisparse.recording.writer import RecordingWriter, check_record_file

ALLOWED = "; allowed: a file, new or to be replaced, in a folder that can be written to"


@contextmanager
def without_privileges() -> Iterator[None]:
    """A superuser may write everywhere; act as nobody."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def refusal(path: Path) -> str:
    """What the check says, without the parts that every such line has."""
    with pytest.raises(ConfigError) as caught:
        check_record_file(path)
    head, text = f'record_file: "{path}" ', str(caught.value)
    assert "\n" not in text and text.startswith(head) and text.endswith(ALLOWED)
    return text.removeprefix(head).removesuffix(ALLOWED)


def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: each mistake is named. Method: a folder, a missing folder, a file for a folder, a pipe."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("")
    os.mkfifo("pipe")
    assert refusal(Path("folder")) == "is a folder"
    assert refusal(Path("missing/trace.topk")) == "is in a folder that is not there"
    assert refusal(Path("file/trace.topk")) == "is in a folder that is not there"
    assert refusal(Path("pipe")) == "is no regular file"


def test_no_permission(tmp_path: Path) -> None:
    """Goal: what the system will refuse later is refused now. Method: a locked folder and a locked file, as nobody."""
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "old.topk").write_text("")
    (locked / "old.topk").chmod(0o400)
    locked.chmod(0o500)
    with without_privileges():
        assert "cannot be written (Permission denied)" == refusal(locked / "new.topk")
        assert "cannot be written (Permission denied)" == refusal(locked / "old.topk")


def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    """Goal: looking changes nothing. Method: an empty folder, then one with a recording under way."""
    path = tmp_path / "trace.topk"
    check_record_file(path)
    assert list(tmp_path.iterdir()) == []
    writer = RecordingWriter(path, Header("0.1.0", "0.5.23", "some/model", top_k=8, page_size=64, groups=(0,)))
    before = path.read_bytes()
    check_record_file(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    writer.close(0, "the test has ended")
