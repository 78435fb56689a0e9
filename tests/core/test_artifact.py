"""Files appear whole or not at all; locks; DONE; digests remembered."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.core import artifact
from ingot.core.artifact import StageDir, atomic_directory, atomic_open, atomic_write, digest_json
from ingot.core.errors import Notice, UserError, os_error_message
from ingot.core.file_hashes import FileHashes


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
    (tmp_path / ".left.123.tmp").write_text("")
    waited: list[str] = []

    def kill_holder(owner: str) -> None:
        waited.append(owner)
        holder.kill()

    with stage.lock(kill_holder):
        assert waited == [str(holder.pid)]
        assert (tmp_path / "LOCK").read_text() == str(os.getpid())
        assert not (tmp_path / ".left.123.tmp").exists()
    holder.wait()
    assert not stage.is_locked()
    with stage.lock(kill_holder):
        assert len(waited) == 1  # nobody holds it


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


@pytest.mark.parametrize("content", ["two", "ONE", "\x00\x01\x02"])
def test_a_file_rewritten_with_its_size_and_time_is_read_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / "f"
    file.write_text("one")
    hashes, before = FileHashes(tmp_path / "memo.json"), file.stat()
    first = hashes.digest(file)
    time.sleep(0.02)  # the clock of file systems ticks every few milliseconds
    with file.open("r+") as handle:  # the same inode
        handle.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert hashes.digest(file) != first


def test_digest_json_does_not_see_the_order_of_keys() -> None:
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1}) != digest_json({"a": 2, "b": 1})


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artifact.fcntl, "flock", flock)
    stage = StageDir(tmp_path / "s")
    with pytest.warns(Notice, match="no locks; do not run this stage twice"), stage.lock():  # noqa: PT031
        assert not stage.is_locked()
        stage.finish()
    assert stage.is_done()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artifact.os, "fsync", fsync)
    atomic_write(tmp_path / "x", "data")
    with atomic_directory(tmp_path / "d") as directory:
        (directory / "a").write_text("one")
    assert (tmp_path / "x").read_text() == "data"
    assert (tmp_path / "d/a").read_text() == "one"


@pytest.mark.parametrize("write", ["file", "directory"])
def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """write(2) and fsync(2) fail without a name; nothing is left behind."""

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(artifact.os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as caught:  # noqa: PT012
        if write == "file":
            atomic_write(tmp_path / "x", "data")
        with atomic_directory(tmp_path / "x") as directory:
            (directory / "a").write_text("one")
    assert (
        os_error_message(caught.value)
        == f"{tmp_path / 'x'}: the disk is full; free space and run the same command again"
    )
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_read_for_a_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "directory", "link"):
        with pytest.raises(UserError, match=f"{name}: not a regular file"):
            FileHashes(tmp_path / "memo.json").digest(tmp_path / name)


def test_deeply_nested_json_is_one_sentence(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 50_000 + "]" * 50_000):
        (tmp_path / "x.json").write_text(text)
        for read in (artifact.read_json, artifact.read_lines):
            with pytest.raises(UserError, match=r"x\.json: not readable"):
                read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("mode", "private"), [(0o700, True), (0o755, True), (0o777, False), (0o757, False), (0o1777, True)]
)
def test_a_directory_is_private_if_no_other_user_can_replace_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, private: bool
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    path = artifact.code_directory("native")
    assert path == tmp_path / "cache/native"
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(mode)
    assert (artifact.code_directory("native") == path) == private
    path.chmod(0o700)
    path.parent.chmod(mode)
    assert (artifact.code_directory("native") == path) == private
    path.parent.chmod(0o700)
    monkeypatch.setattr(artifact.os, "geteuid", lambda: path.stat().st_uid + 1)
    assert (artifact.code_directory("native") == path) == (path.stat().st_uid == 0), "root's files are trusted"


def test_a_directory_that_is_being_replaced_is_there_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each rename; a process that is killed between them leaves it to the next writer."""
    replace = artifact.os.replace

    def interrupted(at: int, killed: bool) -> None:
        calls = iter(range(10))

        def replacing(source: Path, target: Path) -> None:
            number = next(calls)
            if number == at or (killed and number > at):
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(artifact.os, "replace", replacing)
        with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "s/d") as directory:
            (directory / "a").write_text("new")
        monkeypatch.setattr(artifact.os, "replace", replace)

    with StageDir(tmp_path / "s").lock(), atomic_directory(tmp_path / "s/d") as directory:
        (directory / "a").write_text("old")
    for at in (0, 1):
        interrupted(at, killed=False)
        assert (tmp_path / "s/d/a").read_text() == "old"
    interrupted(1, killed=True)
    with StageDir(tmp_path / "s").lock():
        assert (tmp_path / "s/d/a").read_text() == "old"
    assert sorted(f.name for f in (tmp_path / "s").iterdir()) == ["LOCK", "d"]
