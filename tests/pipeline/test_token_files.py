"""A store, written for another tool and read again, trains the same model; the command, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot as package
from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graph
from ingot.report.plan import plan_rows
from ingot.stages.models.load import load_model
from ingot.stages.tokenize.export import export_tokens
from ingot.store.reader import Store

AGAIN = """
[run]
name = "again"
seed = 3

[stage.bpe]
kind = "tokenizer"
type = "file"
path = "runs/tiny/bpe"

[stage.clean]
kind = "token-files"
tokenizer = "bpe"
format = "FORMAT"
train = "out/train.*"
val = "out/val.SUFFIX"

[stage.base]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 2, width = 32, heads = 2, context = 32 }
batch = 8
duration = "4 steps"
precision = "fp32"
evaluate = { every = 2, tokens = 256, sample_tokens = 5 }
loop = { log_every = 1, threads = 1 }
"""


def recipe(work: Path, format: str, suffix: str) -> None:
    text = AGAIN.replace("FORMAT", format).replace("train.*", f"train.{suffix}").replace("SUFFIX", suffix)
    (work / "again.toml").write_text(text)


@pytest.mark.slow
def test_training_on_files_of_another_tool_is_training_on_the_store(
    work: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    monkeypatch.chdir(work)
    first = package.run("tiny.toml", only=["base"], set=["stage.base.duration='4 steps'"])["base"]
    written = ingot("export", "runs/tiny/clean@bpe", "out", "--to", "megatron", cwd=work)
    assert written.returncode == 0, written.stderr
    names = {file.name for file in Path("out").iterdir()}
    assert names == {f"{s}.{x}" for s in ("train", "val") for x in ("bin", "idx")} | {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    recipe(work, "megatron", "bin")
    second = package.run("again.toml")["base"]
    a, b = (load_model(Path(stage.directory), print, device="cpu").model for stage in (first, second))
    differing = [n for (n, p), q in zip(a.named_parameters(), b.parameters(), strict=True) if not p.equal(q)]
    assert differing == []
    assert package.run("again.toml")["base"].directory == second.directory
    for command, found in (
        (("export", "runs/tiny/clean@bpe", "out", "--to", "nanogpt"), "out: exists already"),
        (("export", "runs/tiny/clean", "new", "--to", "nanogpt"), "found no token store"),
        (("export", "runs/tiny/base", "new", "--to", "megatron", "--best"), "--to megatron: found --best"),
        (("export", "runs/tiny/base", "new", "--to", "onnx"), "--to: found 'onnx', expected hf, peft, nanogpt"),
    ):
        refused = ingot(*command, cwd=work)
        assert (refused.returncode, found in refused.stderr) == (2, True), refused.stderr
        assert not Path("new").exists()


def test_a_store_is_read_again_with_the_tokenizer_exported_beside_it(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datatrove's metadata name the tokenizer, and the exported one is another file."""
    monkeypatch.chdir(work)
    stage = Path(package.run("tiny.toml", only=["clean@bpe"])["clean@bpe"].directory)
    export_tokens(stage, Path("out"), "datatrove", print)
    recipe(work, "datatrove", "ds")
    Path("again.toml").write_text(Path("again.toml").read_text().replace("runs/tiny/bpe", "out"))
    again = Path(package.run("again.toml", only=["clean"])["clean"].directory)
    first, second = (Store.open(directory / "train") for directory in (stage, again))
    assert first.tokenizer != second.tokenizer
    assert first.ids.read(0, first.tokens).tolist() == second.ids.read(0, second.tokens).tolist()


def test_the_plan_and_the_key_follow_the_content_of_the_files(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    recipe(work, "megatron", "bin")
    text = (
        Path("again.toml").read_text().replace('type = "file"\npath = "runs/tiny/bpe"', 'from = "words"\nvocab = 300')
    )
    Path("again.toml").write_text(text + '\n[stage.words]\nkind = "corpus"\nsources = ["notes"]\n')

    def node() -> Any:
        return load_graph(Path("again.toml"), [], Path("runs")).nodes["clean"]

    assert "train: found no file 'out/train.bin'" in (node().missing or "")
    Path("out").mkdir()
    for name in ("train.bin", "train.idx", "val.bin", "val.idx"):
        Path("out", name).write_bytes(name.encode())
    before = node()
    assert before.missing is None
    Path("out", "val.idx").write_bytes(b"changed")
    assert node().key != before.key
    Path("out").rename("moved")
    Path("again.toml").write_text(Path("again.toml").read_text().replace("out/", "moved/"))
    Path("moved", "val.idx").write_bytes(b"val.idx")
    assert node().key == before.key
    rows = {row["name"]: row for row in plan_rows(load_graph(Path("again.toml"), [], Path("runs")))}
    assert rows["base"]["forecast"]["parameters"]["total"] > 0
    measured = '\n[stage.card]\nkind = "evaluate"\nmodels = ["base"]\ndata = ["clean"]\n'
    Path("again.toml").write_text(Path("again.toml").read_text().replace('val = "moved/val.bin"', "") + measured)
    with pytest.raises(UserError, match=r"held-out text, but clean holds nothing out; .*val of token files"):
        load_graph(Path("again.toml"), [], Path("runs"))
