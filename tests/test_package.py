"""What users install: the wheel has every file that the product reads, and works outside of the source tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")
SHOW_FILES = """
from pathlib import Path
import importlib.metadata, ingot
from ingot.evaluate.tasks import SUITE
from ingot.kernels import build, cpu_decode, cpu_train
assert importlib.metadata.version("ingot") == ingot.__version__
for path in (ingot.__file__, SUITE, build._COMMON, cpu_decode._SOURCE, cpu_train._SOURCE):
    assert Path(path).exists(), path
    print(path)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy of the sources that has been used."""
    work = tmp_path_factory.mktemp("package")
    shutil.copytree(SRC, work / "src", ignore=CACHES)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, work)
    for used in ("core", "report/templates"):
        (work / "src/ingot" / used / "__pycache__").mkdir()
        (work / "src/ingot" / used / "__pycache__" / "module.cpython-311.pyc").write_bytes(b"x")
    _run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", "dist", cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def _run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_source(wheel: Path) -> None:
    files = {str(file.relative_to(SRC)) for file in SRC.rglob("*") if file.is_file() and "__pycache__" not in str(file)}
    files = {name for name in files if ".egg-info" not in name}
    assert {Path(name).suffix for name in files} >= {".py", ".cpp", ".h", ".toml", ".html", ".js", ".css", ".jsonl"}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files


@pytest.mark.slow
def test_an_installed_wheel_runs_a_recipe(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows this one's packages other than ingot."""
    environment = tmp_path / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin/python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path)
    for file in _run(python, "-c", SHOW_FILES, cwd=tmp_path).splitlines():
        assert file.startswith(str(site)), file

    command = environment / "bin/ingot"
    _run(command, "init", "work", cwd=tmp_path)
    assert (tmp_path / "work/stdlib.toml").read_text() == (SRC / "ingot/recipes/stdlib.toml").read_text()
    (tmp_path / "notes.txt").write_text("a note\n" * 50)
    (tmp_path / "notes.toml").write_text(
        '[run]\nname = "notes"\n[stage.clean]\nkind = "corpus"\nsources = ["notes.txt"]\nquality = "none"\n'
        'holdout = { by = "tail" }\n'
    )
    _run(command, "run", "notes.toml", cwd=tmp_path)
    assert (tmp_path / "runs/notes/report.html").exists()


def test_the_dockerfile_copies_what_exists_and_installs_what_was_tested() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in lines]
    assert names[0] == "FROM"
    copied = {word for name, words in lines if name == "COPY" for word in words.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    (install,) = (words for name, words in lines if name == "RUN" and "pip install" in words)
    assert "--constraint /opt/ingot/constraints.txt /opt/ingot " in install
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt", "src"} == copied
    (user,) = (words for name, words in lines if name == "USER")
    assert user != "root"
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    assert dict(map(tuple, lines))["ENTRYPOINT"] == json.dumps(list(project["scripts"]))
