"""The C++ that is built once: a damaged library is built again, and what an interrupted build leaves is not kept."""

import shutil
from pathlib import Path

import pytest

from ingot.model import library

needed = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@needed
@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:2000], lambda data: bytes(len(data))])
def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage) -> None:
    """Loading half of one ends the process: pages that are mapped and not there."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    source = tmp_path / "made.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    said: list[str] = []
    built = library.build(source, said.append)
    assert built is not None
    assert built.answer() == 42
    (path,) = (tmp_path / "native").iterdir()
    whole = path.read_bytes()
    assert library.build(source, said.append) is not None
    assert len(said) == 1, "it is there"
    path.unlink()  # this process has it mapped
    path.write_bytes(damage(whole))
    again = library.build(source, said.append)
    assert again is not None
    assert again.answer() == 42
    assert len(said) == 2
    assert [p.name for p in (tmp_path / "native").iterdir()] == [path.name]
