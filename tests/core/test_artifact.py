"""Files appear whole or not at all; locks; DONE; digests remembered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core.artifact import FileHashes, StageDir, atomic_directory, atomic_open, atomic_write, digest_json
from ingot.core.errors import UserError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x"
    with pytest.raises(RuntimeError), atomic_open(target) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    atomic_write(target, "old")
    with pytest.raises(RuntimeError), atomic_open(target):
        raise RuntimeError
    assert target.read_text() == "old"


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "d") as directory:  # noqa: PT012
        (directory / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for text in ("one", "two"):
        with atomic_directory(tmp_path / "d") as directory:
            (directory / "a").write_text(text)
    assert (tmp_path / "d" / "a").read_text() == "two"


def test_done_is_the_digest_of_every_output(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    with stage.lock():
        atomic_write(stage / "sub/x", "data")
        stage.finish()
    assert stage.is_done()
    assert list(stage.read_done()["outputs"]) == ["sub/x"]
    assert stage.verify() == []
    (stage / "sub/x").write_text("dama")
    assert stage.verify() == [f"{tmp_path}/sub/x: content differs from its digest"]
    (stage / "sub/x").unlink()
    assert stage.verify() == [f"{tmp_path}/sub/x: missing"]


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ingot.core.artifact import StageDir\n"
        "with StageDir(Path(sys.argv[1])).lock():\n    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()
    stage = StageDir(tmp_path)
    assert stage.is_locked()
    with pytest.raises(UserError, match=f"locked by process {holder.pid}"), stage.lock():
        pass
    holder.kill()
    holder.wait()
    assert not stage.is_locked()
    (tmp_path / ".left.123.tmp").write_text("")
    with stage.lock():
        assert not (tmp_path / ".left.123.tmp").exists()


def test_file_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo.json"
    file.write_text("one")
    hashes = FileHashes(memo)
    first = hashes.digest(file)
    hashes.save()
    again = FileHashes(memo)
    assert again.digest(file) == first
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    assert FileHashes(memo).digest(file) != first


def test_digest_json_does_not_see_the_order_of_keys() -> None:
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1}) != digest_json({"a": 2, "b": 1})
