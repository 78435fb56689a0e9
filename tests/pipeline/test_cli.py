"""The command line on a whole small run: plan, HIT, what changed, trace, generate, gc, silence."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ingot as package
from ingot.cli.options import emit
from ingot.corpus.documents import iter_texts
from ingot.pipeline.gc import orphans
from tests.imports import assert_not_imported


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the small recipe, shared by the tests that only look."""
    from tests.pipeline.conftest import make_work

    path = make_work(tmp_path_factory.mktemp("finished"))
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "tiny.toml"]
    result = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return path


def _states(finished: Path, ingot, *arguments: str) -> dict[str, tuple[str, str]]:
    rows = json.loads(ingot("plan", "tiny.toml", "--json", *arguments, cwd=finished).stdout)
    return {row["name"]: (row["state"], row["why"]) for row in rows}


def test_everything_is_a_hit_the_second_time(finished: Path, ingot) -> None:
    assert {state for state, _ in _states(finished, ingot).values()} == {"HIT"}
    again = ingot("run", "tiny.toml", cwd=finished)
    assert again.returncode == 0
    assert " RUN " not in again.stderr


@pytest.mark.parametrize("stage", ["base", "chat"])
def test_plan_tells_what_the_run_did(finished: Path, ingot, stage: str) -> None:
    """Steps, tokens, epochs, operations, parameters and split, conversations in packed rows included."""
    rows = json.loads(ingot("plan", "tiny.toml", "--json", cwd=finished).stdout)
    told = next(row["forecast"] for row in rows if row["name"] == stage)
    did = json.loads((finished / "runs" / "tiny" / stage / "result.json").read_text())
    assert told["length"]["steps"] == did["steps"]
    assert told["length"]["tokens"] == did["planned_tokens"]
    assert told["length"]["flops"] == did["training_flops"]
    assert told["parameters"]["total"] == did["parameters"]
    assert told["parameters"]["undecayed"] == did["undecayed_parameters"]
    assert told["phases"][0]["peak_lr"] == did["peak_lr"]
    for name, epochs in told["length"]["epochs"].items():
        assert epochs == pytest.approx(did[f"epochs/{name}"], abs=1e-4)
    choices = json.loads((finished / "runs" / "tiny" / stage / "execution.json").read_text())
    assert told["batch"]["micro_batch"] == choices["micro_batch"]
    assert told["memory"]["total"] < did["peak_bytes"]  # which holds the whole process


def test_plan_names_the_setting_that_changed(finished: Path, ingot) -> None:
    states = _states(finished, ingot, "--set", "stage.base.optim.lr=0.01")
    assert states["base"] == ("RUN", "optim.lr null -> 0.01")
    assert states["chat"] == ("RUN", "input base changed")
    assert {states[n][0] for n in ("clean", "talk", "bpe", "clean@bpe", "talk@bpe")} == {"HIT"}


def test_workers_microbatch_and_logging_rerun_nothing(finished: Path, ingot) -> None:
    changes = ["stage.clean.workers=1", "stage.base.loop.micro_batch=2", "stage.chat.loop.log_every=3"]
    states = _states(finished, ingot, *(a for c in changes for a in ("--set", c)))
    assert {state for state, _ in states.values()} == {"HIT"}


def test_json_prints_one_document_and_nothing_else(finished: Path, ingot) -> None:
    for command in (["run", "tiny.toml"], ["plan", "tiny.toml"], ["status", "tiny.toml"], ["verify", "tiny.toml"]):
        result = ingot(*command, "--json", cwd=finished)
        json.loads(result.stdout)
        assert result.stderr == ""


def test_D12_a_stage_directory_holds_all_that_the_contract_names(finished: Path) -> None:
    stage = finished / "runs" / "tiny" / "base"
    for name in ("recipe.toml", "inputs.json", "metrics.jsonl", "result.json", "execution.json", "DONE", "model.json"):
        assert (stage / name).exists(), name
    assert (stage / "checkpoints" / "best" / "manifest.json").exists()
    assert (stage / "checkpoints" / "00000060" / "manifest.json").exists()
    assert (finished / "runs" / "tiny" / "card" / "table.jsonl").exists()
    result = json.loads((stage / "result.json").read_text())
    assert {"val_loss_nats", "bits_per_byte", "tokens", "seconds", "peak_bytes", "decayed_parameters"} <= set(result)


def test_D15_what_a_train_stage_records(finished: Path) -> None:
    """Train and validation loss at the start and at every interval, and how many numbers decay."""
    stage = finished / "runs" / "tiny" / "base"
    events = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    evaluations = [e for e in events if e["event"] == "evaluation"]
    assert [e["step"] for e in evaluations] == [0, 20, 40, 60]
    assert all({"val_loss_nats", "train_loss_nats"} <= set(e) for e in evaluations)
    (plan,) = (e for e in events if e["event"] == "plan")
    assert plan["decayed_parameters"] + plan["undecayed_parameters"] == plan["parameters"]
    assert plan["undecayed_parameters"] == (2 * 2 + 1) * 32  # the norms
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 61))
    assert {"loss_nats", "lr", "grad_norm", "tokens", "tok_s"} <= set(steps[0])
    assert steps[0]["lr"] > 0


def test_F4_tasks_are_sat_by_every_model_and_their_answers_are_kept(finished: Path) -> None:
    card = finished / "runs" / "tiny" / "card"
    rows = {(r["model"], r["task"], r["metric"]): r for r in map(json.loads, (card / "table.jsonl").open())}
    for model in ("base", "chat"):
        assert rows[model, "icl-copy", "chance"]["value"] == 0.25
        assert rows[model, "icl-copy", "accuracy"]["n"] == 40
        assert rows[model, "echo", "target_nats_per_byte"]["value"] > 0
    answers = [json.loads(line) for line in (card / "answers.jsonl").open()]
    assert len(answers) == 2 * (4 + 42)
    assert all(a["right"] == (a["answer"].strip() == "cat mat") for a in answers if a["prompt"] == "say cat mat 3")
    page = (finished / "runs" / "tiny" / "report.html").read_text()
    assert "Task icl-copy" in page


def test_held_out_questions_are_compared_with_their_answers(finished: Path) -> None:
    """Questions that no model was trained on; the page shows some with the answer that was expected."""
    run = finished / "runs" / "tiny"
    answers = [a for a in map(json.loads, (run / "card" / "answers.jsonl").open()) if a["task"] == "talk"]
    assert [a["model"] for a in answers] == ["base"] * 4 + ["chat"] * 4
    assert all(a["prompt"].startswith(f"say {a['expected']} ") for a in answers)
    assert all(a["right"] == (a["answer"].strip() == a["expected"]) for a in answers)
    held_out = "".join(iter_texts(run / "talk", "val"))
    assert all(json.dumps(a["prompt"]) in held_out for a in answers)
    rows = {(r["model"], r["task"], r["metric"]): r for r in map(json.loads, (run / "card" / "table.jsonl").open())}
    assert rows["chat", "talk", "accuracy"]["value"] == sum(a["right"] for a in answers[4:]) / 4
    page = (run / "report.html").read_text()
    assert "right and wrong answers of chat" in page
    assert "They know 14 words." in page


def test_generate_is_repeatable_and_chat_answers(finished: Path, ingot) -> None:
    runs = [
        ingot("generate", "runs/tiny/base", "the cat", "--seed", 3, "--max-new", 8, "--json", cwd=finished)
        for _ in "ab"
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    chat = ingot("chat", "runs/tiny/chat", cwd=finished, input="say cat dog 1\n\n")
    assert chat.returncode == 0, chat.stderr
    assert "it>" in chat.stdout


def test_python_door(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    model = package.load(finished / "runs" / "tiny" / "base")
    assert model.generate("the", max_new=4, seed=1) == model.generate("the", max_new=4, seed=1)
    done = package.run("tiny.toml", only=["clean"])
    assert (done["clean"].directory / "DONE").exists()


def test_inspect(finished: Path, ingot) -> None:
    for what, stage in (("corpus", "clean"), ("mask", "talk@bpe"), ("store", "clean@bpe"), ("checkpoint", "base")):
        result = ingot("inspect", what, f"runs/tiny/{stage}", "--json", cwd=finished)
        assert result.returncode == 0, result.stderr
        json.loads(result.stdout)


def test_trace_is_what_was_trained_on(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty random batches of both train stages, recorded where the loop takes them, against `trace`."""
    import numpy as np

    from ingot.stages import child
    from ingot.stages.training import build
    from ingot.stages.training.trace import documents, open_training_data, trace
    from ingot.train.engine import Engine

    rng = np.random.default_rng(4)
    for name, steps in (("base", 60), ("chat", 20)):
        seen: dict[int, list[list[int]]] = {}
        original = Engine.step

        def spy(self, raw, original=original, seen=seen):
            lengths = [(row != -100).any() and len(row) for row in raw.labels_BT]
            assert all(lengths)
            seen[self.state["step"] + 1] = [row.tolist() for row in raw.ids_BT]
            return original(self, raw)

        monkeypatch.setattr(Engine, "step", spy)
        stage = finished / "runs" / "tiny" / name
        record = json.loads((stage / "inputs.json").read_text())
        job = {
            **record,
            "recipe": {},
            "root": str(finished / "runs"),
            "dir": str(finished / f"again-{name}"),
            "quiet": True,
        }
        child.run(job)
        monkeypatch.setattr(Engine, "step", original)
        data, timeline, _ = open_training_data(stage)
        for step in rng.choice(np.arange(1, steps + 1), 10, replace=False):
            pieces = ((traced.source, piece) for traced in trace(stage, int(step)) for piece in traced.pieces)
            named = {f"{source} {piece['path']} {piece['offset']}" for source, piece in pieces}
            assert set(documents(data, timeline, int(step))) == named
            for traced, trained in zip(trace(stage, int(step)), seen[int(step)], strict=True):
                ids = traced.ids.tolist()
                assert trained[: len(ids) - 1] == ids[:-1]
                assert set(trained[len(ids) :]) <= {trained[-1]}  # padding
                assert all(p["path"] for p in traced.pieces)
    assert build.run  # the builder that the child ran


@pytest.mark.slow
def test_trace_of_a_document_is_the_steps_that_hold_it(finished: Path, ingot) -> None:
    from ingot.stages.training.trace import trace, trace_document

    for name, steps in (("base", 60), ("chat", 20)):
        stage = finished / "runs" / "tiny" / name
        held: dict[tuple[str, str, int], set[int]] = {}
        for step in range(1, steps + 1):
            for row in trace(stage, step):
                for piece in row.pieces:
                    held.setdefault((row.source, piece["path"], piece["offset"]), set()).add(step)
        for path in sorted({path for _, path, _ in held})[-8:]:
            for found in trace_document(stage, path):
                here = held.get((found["corpus"], found["path"], found["offset"]), set())
                assert found["steps"] == sorted(here)
    shown = ingot("trace", "runs/tiny/chat", "--document", "talk.jsonl", "--rows", "2", cwd=finished).stdout
    assert shown.count("talk: ") == 2
    assert "steps: " in shown
    absent = ingot("trace", "runs/tiny/chat", "--document", "nothing.txt", cwd=finished)
    assert absent.returncode == 2
    assert "nothing.txt: no document of clean, talk is from this file, expected one such as" in absent.stderr


@pytest.mark.slow
def test_places_of_a_text(finished: Path, ingot) -> None:
    note = (finished / "notes" / "07.txt").read_text().split()
    text = " ".join(note[10:22])
    found = json.loads(ingot("trace", "runs/tiny/chat", "--text", text, "--json", cwd=finished).stdout)
    assert "notes/07.txt" in {place["path"] for place in found["places"]}
    shown = ingot("trace", "runs/tiny/base", "--text", f"{text} zebra", "--rows", "1", cwd=finished)
    assert f'"{text}": 12 words, ' in shown.stdout
    assert "built once" not in shown.stderr, "the first search has built the index"
    arguments = ("generate", "runs/tiny/base", "the", "--sources", "--words", "2", "--max-new", "30", "--jsonl")
    record = json.loads(ingot(*arguments, cwd=finished).stdout)
    assert {"first", "last", "places"} <= record["sources"][0].keys()


@pytest.mark.slow
def test_gc_lists_and_deletes_only_orphans(finished: Path, ingot) -> None:
    arguments = ("run", "tiny.toml", "--only", "bpe", "--set", "stage.bpe.vocab=290")
    assert ingot(*arguments, cwd=finished).returncode == 0
    assert ingot("run", "tiny.toml", cwd=finished).returncode == 0  # links point back
    listed = json.loads(ingot("gc", "--json", cwd=finished).stdout)
    assert [re.sub("-.*", "", Path(o["directory"]).name) for o in listed] == ["tokenizer"]
    assert [o["what"] for o in listed] == ["bpe, done"]
    assert ingot("gc", "--delete", cwd=finished).returncode == 0
    assert json.loads(ingot("gc", "--json", cwd=finished).stdout) == []
    assert {state for state, _ in _states(finished, ingot).values()} == {"HIT"}


def test_gc_spares_what_an_unfinished_stage_reads(finished: Path, tmp_path: Path) -> None:
    """The links have moved on to other results while a stage that reads the old ones is being made."""
    root = shutil.copytree(finished / "runs", tmp_path / "runs", symlinks=True)
    (root / "tiny" / "base").resolve().joinpath("DONE").unlink()
    tokens = {(root / "tiny" / name).resolve() for name in ("bpe", "clean@bpe")}
    for link in (root / "tiny").iterdir():
        if link.is_symlink() and link.name != "base":
            link.unlink()
    left = {o.path.resolve() for o in orphans(root)}
    assert left
    assert any(re.fullmatch(r"chat, done, validation loss \d+\.\d{4}", o.description) for o in orphans(root))
    assert not left & tokens


@pytest.mark.slow
def test_directories_may_be_links_to_other_places(finished: Path, tmp_path: Path, ingot) -> None:
    work = shutil.copytree(finished, tmp_path / "work", symlinks=True)
    shutil.move(work / "runs" / "stages", tmp_path / "elsewhere")
    (work / "runs" / "stages").symlink_to(tmp_path / "elsewhere")
    shutil.move(work / "runs" / "tiny", tmp_path / "far" / "away")
    (work / "runs" / "tiny").symlink_to(tmp_path / "far" / "away")
    assert ingot("run", "tiny.toml", cwd=work).returncode == 0
    assert (work / "runs" / "tiny" / "base" / "DONE").exists(), "its link leads there from where the directory is"
    assert orphans(work / "runs") == []
    assert ingot("trace", "runs/tiny/base", "--step", "1", cwd=work).returncode == 0
    assert ingot("compare", "runs/tiny", cwd=work).returncode == 0
    assert not (tmp_path / "compare.html").exists()


def test_who_has_read_enough_and_places_of_other_signs(finished: Path) -> None:
    command = f"{sys.executable} -c 'from ingot.cli.app import main; main()' plan tiny.toml"
    piped = f"set -o pipefail; {command} --json | head -c 1"
    assert subprocess.run(["bash", "-c", piped], cwd=finished, capture_output=True, check=False).returncode == 0
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(["bash", "-c", command], cwd=finished, capture_output=True, check=False, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()


def test_json_has_no_word_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": [1.5, float("nan")], "b": {"c": (float("inf"), "x")}}, True, None)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [1.5, None],
        "b": {"c": [None, "x"]},
    }


@pytest.mark.slow
def test_damaged_and_missing_files_are_named(finished: Path, tmp_path: Path, ingot) -> None:
    work = shutil.copytree(finished, tmp_path / "work", symlinks=True)
    base, clean = (work / "runs" / "tiny" / name for name in ("base", "clean"))
    (base / "model.json").write_bytes(b"\xff\xfe{}")
    (clean / "dropped.parquet").write_bytes(b"no table")
    for command, name in (("generate", "model.json"), ("inspect", "dropped.parquet")):
        arguments = ("generate", base, "x") if command == "generate" else ("inspect", "corpus", clean)
        found = ingot(*arguments, cwd=work)
        assert (found.returncode, name in found.stderr) == (2, True), found.stderr
        assert "Traceback" not in found.stderr
    (clean / "funnel.json").unlink()
    found = ingot("inspect", "corpus", clean, cwd=work)
    assert (found.returncode, "funnel.json: not readable" in found.stderr) == (2, True)


def test_help_comes_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['ingot', '--help']\n"
        "from ingot.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'polars' not in sys.modules, 'heavy imports'\n"
        "import ingot.pipeline.run, ingot.report.html.page, ingot.stages.kinds\n"
        "assert 'torch' not in sys.modules, 'the parent process imports torch'\n"
        "assert 'polars' not in sys.modules, 'polars takes over SIGINT, also of a run that ignores it'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "plan" in result.stdout


def test_help_imports_only_what_draws_it() -> None:
    """`ingot --help` takes a fifth of a second because nothing that reads recipes or data is imported for it."""
    code = "import sys; sys.argv[1:] = ['--help']\nfrom ingot.cli.app import main\ntry: main()\nexcept SystemExit: pass"
    assert_not_imported(code, "pydantic", "numpy", "polars", "torch", "pyarrow")
