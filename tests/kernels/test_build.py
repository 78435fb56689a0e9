"""The C++ that is built once: all of it compiles, and what is damaged or half built is built again."""

import shutil
from pathlib import Path

import pytest

import ingot
from ingot.kernels import build

needed = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@needed
@pytest.mark.parametrize(
    ("room", "flags"), [("infer", ()), ("train", ("-DNUMBER=float",)), ("train", ("-DNUMBER=bf16",))], ids=str
)
def test_all_of_it_compiles(room: str, flags: tuple[str, ...]) -> None:
    """What cannot be built is done without, and its tests are skipped: nothing else would tell of a mistake."""
    said: list[str] = []
    source = Path(ingot.__file__).parent / room / "cpp" / "native.cpp"
    assert build.build(source, said.append, flags) is not None, said


@needed
def test_who_cannot_build_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("int answer() { return forty_two; }\n")
    said: list[str] = []
    assert build.build(source, said.append) is None
    assert "broken.cpp:1" in said[-1]
    assert "forty_two" in said[-1]


@needed
@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:2000], lambda data: bytes(len(data))])
def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage) -> None:
    """Loading half of one ends the process: pages that are mapped and not there."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    source = tmp_path / "made.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    said: list[str] = []
    built = build.build(source, said.append)
    assert built is not None
    assert built.answer() == 42
    (path,) = (tmp_path / "native").iterdir()
    whole = path.read_bytes()
    assert build.build(source, said.append) is not None
    assert len(said) == 1, "it is there"
    path.unlink()  # this process has it mapped
    path.write_bytes(damage(whole))
    again = build.build(source, said.append)
    assert again is not None
    assert again.answer() == 42
    assert len(said) == 2
    assert [p.name for p in (tmp_path / "native").iterdir()] == [path.name]
