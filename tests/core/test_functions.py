"""The user's own functions: found without running them, with all that they import and read."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.functions import function_files, load_function, require_file

TEXT = """
from os.path import basename as last
raise SystemExit("this is not to be run")
def score(prompts, completions): ...
if True:
    async def later(): ...
    named = score
typed: object = score
"""


def test_a_function_is_found_without_running_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(TEXT)
    for name in ("score", "later", "named", "typed", "last"):
        assert require_file(f"{file}:{name}", "by") == file
    with pytest.raises(UserError, match=r"by: '.*own\.py:scor': .* has no function 'scor'; did you mean 'score'\?"):
        require_file(f"{file}:scor", "by")
    file.write_text("from somewhere import *\n")
    assert require_file(f"{file}:anything", "by") == file, "only running it would tell"
    file.write_text("def score(:\n")
    with pytest.raises(UserError, match=r"own\.py is not Python \(.*own\.py, line 1\)\); fix it"):
        require_file(f"{file}:score", "by")


def test_the_files_of_the_shipped_recipes_are_found_from_anywhere(project: Path) -> None:
    right = load_function("answers.py:right", "reward")
    assert right([{"answer": "a"}] * 2, ["a ", "b"]) == [1.0, 0.0]
    (project / "answers.py").write_text("def right(prompts, completions): return [7.0]")
    assert load_function("answers.py:right", "reward")([], []) == [7.0], "a file of the user's comes first"
    with pytest.raises(UserError, match=r"no file elsewhere/answers\.py"):
        require_file("elsewhere/answers.py:right", "reward")


# -- what a function imports and reads ---------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


IMPORTS = {
    "plain": ("import words\ndef f(): return words.X", {"words.py": "X = 3"}, ["words.py"]),
    "inside the function": ("def f():\n    from words import X\n    return X", {"words.py": "X = 3"}, ["words.py"]),
    "by name": (
        "import importlib\ndef f(): return importlib.import_module('words').X",
        {"words.py": "X = 3"},
        ["words.py"],
    ),
    "of what is imported": (
        "from words import X\ndef f(): return X",
        {"words.py": "from more import X", "more.py": "X = 3"},
        ["more.py", "words.py"],
    ),
    "a package": (
        "from pack.deep import X\ndef f(): return X",
        {"pack/__init__.py": "", "pack/deep.py": "from .low import X", "pack/low.py": "X = 3"},
        ["pack/__init__.py", "pack/deep.py", "pack/low.py"],
    ),
    "a package without __init__": (
        "import bare.words\ndef f(): return bare.words.X",
        {"bare/words.py": "X = 3"},
        ["bare/words.py"],
    ),
    "each other": (
        "import a\ndef f(): return a.X",
        {"a.py": "import b\nX = 3", "b.py": "import a"},
        ["a.py", "b.py"],
    ),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_a_function_imports_what_is_beside_it_and_all_of_it_counts(project: Path, case: str) -> None:
    text, modules, expected = IMPORTS[case]
    _write({"own/my.py": text, **{f"own/{name}": content for name, content in modules.items()}})
    assert function_files("own/my.py:f", "by") == [Path("own/my.py"), *(Path("own", name) for name in expected)]
    before = set(sys.modules)
    assert load_function("own/my.py:f", "by")() == 3
    assert {name for name in set(sys.modules) - before if not name.startswith("ingot_user_")} <= {"importlib"}


def test_modules_of_the_same_name_in_two_directories_do_not_mix(project: Path) -> None:
    functions = {}
    for name in ("left", "right"):
        text = "import words\ndef now(): return words.X\ndef later():\n    import words as w\n    return w.X"
        _write({f"{name}/my.py": text, f"{name}/words.py": f"X = {name!r}"})
        functions[name] = [load_function(f"{name}/my.py:{f}", "by") for f in ("now", "later")]
    for _ in range(2):
        for name, (now, later) in functions.items():
            assert (now(), later()) == (name, name)
    with ThreadPoolExecutor(4) as pool:
        calls = [(name, pool.submit(later)) for _ in range(20) for name, (_, later) in functions.items()]
        assert all(call.result() == name for name, call in calls)


def test_an_edit_within_a_second_is_executed(project: Path) -> None:
    _write({"my.py": "import words\ndef f(): return words.X", "words.py": "X = 'one'"})
    assert load_function("my.py:f", "by")() == "one"
    _write({"words.py": "X = 'two'"})
    sys.modules.pop("words", None)
    code = "import sys; from ingot.core.functions import load_function; print(load_function('my.py:f', 'by')())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "two\n"


def test_installed_modules_and_pythons_own_do_not_count(project: Path) -> None:
    _write({"my.py": "import json, pytest, torch.nn\nfrom ingot.core import errors\ndef f(): ..."})
    _write({"json.py": "raise SystemExit"})
    assert function_files("my.py:f", "by") == [Path("my.py")]
    load_function("my.py:f", "by")


def test_a_module_on_the_path_counts(project: Path) -> None:
    _write({"my.py": "from lists import X\ndef f(): return X", "other/lists.py": "X = 3"})
    code = (
        "from ingot.core.functions import function_files, load_function\n"
        "print(*function_files('my.py:f', 'by'), load_function('my.py:f', 'by')())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project / "other"), *sys.path])}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert made.stdout == "my.py other/lists.py 3\n", made.stderr


READS = {
    "a string": ("def f(): return open('banned.json').read()", ["banned.json"]),
    "beside the file": (
        "from pathlib import Path\ndef f(): return Path(__file__).with_name('near.txt').read_text()",
        ["own/near.txt"],
    ),
    "in parts": (
        "from pathlib import Path\ndef f(): return (Path(__file__).parent / 'lists' / 'c.txt').read_text()",
        ["own/lists/c.txt"],
    ),
    "a path of parts": (
        "from pathlib import Path\ndef f(): return (Path('own') / 'lists' / 'c.txt').read_text()",
        ["own/lists/c.txt"],
    ),
    "joined": (
        "import os\ndef f(): return open(os.path.join(os.path.dirname(__file__), 'lists', 'c.txt')).read()",
        ["own/lists/c.txt"],
    ),
    "listed": (
        "FILES = ['data/a.txt']\nN = 'a'\ndef f(): return open(f'data/{N}.txt').read()",
        ["data/a.txt"],
    ),
    "a listed directory": (
        "FILES: list = ['data']\nimport glob\ndef f(): return open(sorted(glob.glob('data/*'))[0]).read()",
        ["data/a.txt", "data/b.txt"],
    ),
}


@pytest.mark.parametrize("case", READS)
def test_the_data_files_that_a_function_names_count(project: Path, case: str) -> None:
    text, expected = READS[case]
    _write({"own/my.py": text, "banned.json": "x", "own/near.txt": "x", "other.txt": "x"})
    _write({"data/a.txt": "x", "data/b.txt": "y", "own/lists/c.txt": "x"})
    assert function_files("own/my.py:f", "by") == [Path("own/my.py"), *map(Path, expected)]
    assert load_function("own/my.py:f", "by")() == "x"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def f(): return open('ban' + 'ned.json').read()", r"it reads banned\.json, which is not part of the stage's"),
        ("FILES = []\ndef f(): return open('banned.json').read()", r"it reads banned\.json, which is not part"),
        ("import os\nX = open(os.listdir('data')[0:1][0] and 'data/a' + '.txt').read()\ndef f(): ...", r"data/a\.txt"),
        ("import importlib as i\ndef f(): return i.import_module('wo' + 'rds')", r"it reads words\.py, which is not"),
        (
            "def f():\n    with open('banned.json', 'a') as file: file.write('x')",
            r"it writes banned\.json, which is part",
        ),
        ("FILES = ['none.txt']\ndef f(): ...", r"FILES names 'none\.txt', which does not exist"),
        ("FILES = [str(1)]\ndef f(): ...", r"found FILES = \[str\(1\)\], expected a list of names of files"),
        ("import words\ndef f(): ...", None),
    ],
)
def test_a_read_that_the_key_would_miss_is_refused(project: Path, text: str, problem: str | None) -> None:
    _write({"my.py": text, "words.py": "X = 1", "banned.json": "x", "data/a.txt": "x"})
    if problem is None:
        return load_function("my.py:f", "by")()
    with pytest.raises(UserError, match=problem) as caught:
        load_function("my.py:f", "by")()
    assert "\n" not in str(caught.value)


def test_a_function_may_write_and_read_files_of_its_own(project: Path) -> None:
    text = "from pathlib import Path\nP = Path('lo' + 'g')\ndef f():\n    P.write_text('x')\n    return P.read_text()"
    _write({"my.py": text})
    assert load_function("my.py:f", "by")() == "x"


def test_a_broken_neighbour_is_named_before_anything_runs(project: Path) -> None:
    _write({"my.py": "import words\ndef f(): ...", "words.py": "def (:"})
    with pytest.raises(UserError, match=r"by: 'my\.py:f': words\.py is not Python"):
        function_files("my.py:f", "by")
