"""Building C++: every library compiles, one is built once, and a damaged one is built again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.core import artifact
from ingot.kernels import build, cpu_decode, cpu_train

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
BUILDING = "building C++ kernels for this CPU, once; this takes some seconds"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library, and a cache in which nothing is built."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_SIGN_S", 3600)
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    return path


@needs_compiler
@pytest.mark.parametrize(
    ("path", "macros"),
    [(cpu_decode._SOURCE, ()), *((cpu_train._SOURCE, (f"-DNUMBER={name}",)) for name in ("float", "bf16"))],
    ids=["decode", "train in fp32", "train in bf16"],
)
def test_all_kernels_compile(path: Path, macros: tuple[str, ...]) -> None:
    """PyTorch replaces what cannot be built and its tests are skipped, so nothing else would tell of a mistake."""
    messages: list[str] = []
    assert build.build(path, messages.append, macros) is not None, messages


@needs_compiler
def test_a_library_is_built_once_for_each_set_of_macros(source: Path) -> None:
    messages: list[str] = []
    for answer, built in ((41, 1), (41, 1), (42, 2), (42, 2)):
        library = build.build(source, messages.append, (f"-DANSWER={answer}",))
        assert library is not None
        assert library.answer() == answer
        assert messages == [BUILDING] * built
    source.write_text(source.read_text() + "\n// changed\n")
    assert build.build(source, messages.append, ("-DANSWER=42",)) is not None
    assert messages == [BUILDING] * 3


@needs_compiler
def test_a_slow_build_says_that_it_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(build, "_SIGN_S", 0.001)
    assert build.build(source, messages.append, ("-DANSWER=41",)) is not None
    first, *others = messages
    assert first == BUILDING
    assert others
    assert all(message.startswith("still building C++ kernels after ") for message in others)


@needs_compiler
def test_the_compilers_first_error_is_reported(source: Path) -> None:
    messages: list[str] = []
    source.write_text("int answer() { return forty_two; }\n")
    assert build.build(source, messages.append) is None
    assert build.build(source) is None, "nobody asked for messages"
    assert messages[0] == BUILDING
    assert messages[1].startswith("g++ could not build the C++ kernels (")
    assert "small.cpp:1" in messages[1]
    assert "forty_two" in messages[1]
    assert messages[1].endswith("; using PyTorch, which is slower")


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", "true"])
def test_a_compiler_that_does_not_work(source: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing, fails, or writes nothing; nothing is left behind."""
    monkeypatch.setenv("CXX", compiler)
    messages: list[str] = []
    assert build.build(source, messages.append) is None
    assert messages[1].startswith(f"{compiler} could not build the C++ kernels (")
    assert list((artifact.cache_directory() / "native").iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_error(source: Path) -> None:
    (artifact.cache_directory() / "native").write_text("")
    messages: list[str] = []
    assert build.build(source, messages.append, ("-DANSWER=42",)) is None
    assert "could not build" in messages[-1]


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-100], lambda data: data[:2000], lambda data: bytes(len(data))],
    ids=["shorter", "a beginning", "zeros"],
)
def test_a_damaged_library_is_built_again(source: Path, damage: Callable[[bytes], bytes]) -> None:
    """A process that loads half of one ends."""
    messages: list[str] = []
    assert build.build(source, messages.append, ("-DANSWER=42",)) is not None
    (path,) = (artifact.cache_directory() / "native").iterdir()
    complete = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(damage(complete))
    again = build.build(source, messages.append, ("-DANSWER=42",))
    assert again is not None
    assert again.answer() == 42
    assert messages == [BUILDING] * 2
    assert list((artifact.cache_directory() / "native").iterdir()) == [path]


@needs_compiler
@pytest.mark.parametrize("place", ["library", "directory", "cache"])
def test_a_library_that_other_users_can_replace_is_not_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert build.build(source, macros=("-DANSWER=42",)) is not None
    (path,) = (artifact.cache_directory() / "native").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    {"library": path, "directory": path.parent, "cache": artifact.cache_directory()}[place].chmod(0o777)
    loaded: list[str] = []
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: loaded.append(name))
    messages: list[str] = []
    build.build(source, messages.append, ("-DANSWER=42",))
    assert messages[0] == BUILDING
    if place == "library":  # the directory is private, so a new one is written there
        assert loaded == [str(path)]
        assert path.stat().st_mode & 0o077 == 0
    else:
        assert str(path) not in loaded
        assert "other users can write to this cache" in messages[1]


def test_a_library_of_another_user_is_not_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact.cache_directory() / "a.so"
    data = b"library"
    path.write_bytes(data + build._checksum(data))
    assert build._is_intact(path)
    monkeypatch.setattr(artifact.os, "geteuid", lambda: 12345)
    assert build._is_intact(path) == (path.stat().st_uid == 0)
    os.chown(path, 54321, 54321) if os.getuid() == 0 else None
    assert not build._is_intact(path)
