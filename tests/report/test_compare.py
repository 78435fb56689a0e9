"""`ingot compare`: what is grouped, what differs, what an interval says, and what does not compare at all."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import atomic_json, digest_json
from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.core.statistics import mean_interval
from ingot.report.compare.compare import Comparison, compare
from ingot.report.compare.page import narrow, write_comparison
from ingot.report.compare.table import data, headings, print_comparison, rows
from ingot.report.terminal import console


def _stage(root: Path, kind: str, canonical: dict[str, Any], inputs: dict[str, Path], seed: int | None = None) -> Path:
    """A stage's directory with the record that its process writes first."""
    told = {role: json.loads((p / "inputs.json").read_text()) for role, p in inputs.items()}
    key = digest_json([kind, canonical, seed, {role: t["key"] for role, t in told.items()}])[:20]
    path = root / "stages" / f"{kind}-{key}"
    record = {
        "name": canonical.get("_name", kind),
        "kind": kind,
        "key": key,
        "version": 1,
        "seed": seed,
        "raw": None,
        "settings": {**canonical, "workers": 2},
        "canonical": canonical,
        "inputs": {
            role: {"name": t["name"], "key": t["key"], "dir": f"stages/{inputs[role].name}"} for role, t in told.items()
        },
    }
    atomic_json(path / "inputs.json", record)
    return path


def _train(
    root: Path,
    place: str,
    loss: float,
    *,
    seed: int = 1,
    lr: float = 0.1,
    vocab: int = 300,
    text: str = "notes",
    init: Path | None = None,
    objective: str = "lm",
    steps: int = 40,
    finished: bool = True,
    **more: float,
) -> Path:
    """A train stage below runs/PLACE with a corpus and a tokenizer behind it."""
    corpus = _stage(root, "corpus", {"_name": "clean", "sources": text}, {})
    bpe = _stage(root, "tokenizer", {"_name": "bpe", "vocab": vocab}, {"corpus:clean": corpus})
    tokens = _stage(root, "tokens", {"_name": "clean@bpe"}, {"corpus": corpus, "tokenizer": bpe})
    settings = {"_name": place.rpartition("/")[2], "optim": {"lr": lr, "clip": 1.0}, "data": {"clean": 1.0}}
    settings["objective"] = {"kind": objective}
    start = {"init": init.resolve()} if init else {}
    stage = _stage(root, "train", settings, {"tokenizer": bpe, "data:clean": tokens, **start}, seed)
    log = EventLog(stage / "metrics.jsonl")
    facts = {"parameters": 1000 * vocab, "steps": 40, "batch_tokens": 100.0}
    log.write("plan", **facts)
    for step in range(1, steps + 1):
        log.write(
            "step",
            step=step,
            loss_nats=8 / step + loss,
            grad_norm=1.0,
            lr=lr,
            tokens=100,
            tokens_seen=100 * step,
            tok_s=50,
        )
        if step % 10 == 0:
            log.write("evaluation", step=step, val_loss_nats=loss + (steps - step) / 10)
    log.close()
    if finished:
        result = {"val_loss_nats": loss, "best_val_loss_nats": loss, "tokens": 100 * steps, "tok_s": 50, "seconds": 9.5}
        atomic_json(stage / "result.json", {**facts, **result, **more})
    link = root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(stage)
    return link


def _sweep(root: Path, losses: dict[tuple[float, int], float]) -> Path:
    for (lr, seed), loss in losses.items():
        _train(root, f"lrs/lr={lr},seed={seed}/base", loss, seed=seed, lr=lr, bits_per_byte=loss / 2)
    points = [{"label": f"lr={lr},seed={s}", "values": {"stage.base.optim.lr": lr, "run.seed": s}} for lr, s in losses]
    atomic_json(root / "lrs" / "sweep.json", {"points": points})
    return root / "lrs"


LOSSES = {(0.1, 1): 3.0, (0.1, 2): 5.0, (0.1, 3): 7.0, (0.2, 1): 2.90, (0.2, 2): 4.89, (0.2, 3): 6.91}


def _only(paths: list[Path], metric: str | None = None) -> Comparison:
    (found,) = compare(paths, metric)
    return found


def _printed(found: Comparison, capsys: pytest.CaptureFixture[str]) -> str:
    print_comparison(found, console())
    return capsys.readouterr().out


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _only([_sweep(tmp_path, LOSSES)])
    assert [(g.label, len(g.entries)) for g in found.groups] == [("lr=0.1", 3), ("lr=0.2", 3)]
    for group, losses in zip(found.groups, ([3.0, 5.0, 7.0], [2.90, 4.89, 6.91]), strict=True):
        assert group.mean("val_loss_nats") == mean_interval(losses)
    assert found.differing == {"optim.lr": [0.1, 0.2]}
    shown = _printed(found, capsys)
    assert "5.0000 ± 4.9683" in shown  # 4.3027 * 2 / sqrt(3)
    assert "setting   lr=0.1  lr=0.2" in shown


def test_equal_seeds_are_compared_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seeds differ by units and the setting by a tenth: apart the intervals overlap, paired they exclude zero."""
    found = _only([_sweep(tmp_path, LOSSES)])
    apart = [g.mean("val_loss_nats") for g in found.groups]
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[1].high is not None
    assert apart[1].high > apart[0].mean  # the control: unpaired, nothing can be said
    ((_, _, difference),) = found.paired
    assert (difference.n, round(difference.mean, 10)) == (3, -0.1)
    assert difference.high is not None
    assert difference.high < 0
    assert "lr=0.2 - lr=0.1: -0.1000 (-0.1248 to -0.0752), 3 seeds, more than chance" in _printed(found, capsys)
    same = _sweep(tmp_path / "same", {k: v + (0.3 if k == (0.2, 1) else 0) for k, v in LOSSES.items()})
    assert "could be chance" in _printed(_only([same]), capsys)


def test_seeds_that_only_one_group_has_are_left_out_of_pairs(tmp_path: Path) -> None:
    found = _only([_sweep(tmp_path, {k: v for k, v in LOSSES.items() if k != (0.2, 3)})])
    assert found.paired[0][2].n == 2
    found = _only([_sweep(tmp_path / "b", {k: v for k, v in LOSSES.items() if k in ((0.1, 1), (0.2, 2))})])
    assert found.paired == []


def test_D15_source_error_losses_compare_within_one_tokenizer_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """003 calls 1.5 nats "GPT-2 level", which has 3.1: here the larger loss is the better model, by bits per byte."""
    a = _train(tmp_path, "chars/base", 1.5, vocab=65, bits_per_byte=1.5 / math.log(2))
    b = _train(tmp_path, "words/base", 3.1, vocab=50257, bits_per_byte=3.1 / math.log(2) / 4.3)
    found = _only([a, b])
    assert found.metric == "bits_per_byte"
    assert any("the tokenizers differ: losses in nats per token are not comparable, bits" in w for w in found.warnings)
    talks = [_train(tmp_path, f"{name}/chat", 1.5, vocab=v) for name, v in (("a", 65), ("b", 257))]
    (warning,) = (w for w in _only(talks).warnings if "tokenizers" in w)  # answers have no bits per byte
    assert warning.endswith("not comparable; compare answers with a judge stage")
    assert found.differing["bpe.vocab"] == [65, 50257]
    best = min(found.groups, key=lambda g: g.by_seed(found.metric)[(1,)])
    assert best.label == "words"
    assert "not comparable" in _printed(found, capsys)
    c = _train(tmp_path, "again/base", 1.4, vocab=65, lr=0.3)
    assert _only([a, c]).metric == "val_loss_nats"
    assert _only([a, c]).warnings == []


def test_different_held_out_text_is_told(tmp_path: Path) -> None:
    runs = [_train(tmp_path, f"{text}/base", 2.0, text=text) for text in ("notes", "mail")]
    assert any("the held-out text" in w for w in _only(runs).warnings)


def test_unfinished_runs_say_so_and_are_in_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [_train(tmp_path, f"r{seed}/base", 2.0 + seed, seed=seed) for seed in (1, 2)]
    paths.append(_train(tmp_path, "r3/base", 90.0, seed=3, steps=25, finished=False))
    found = _only(paths)
    (group,) = found.groups
    assert group.mean("val_loss_nats") == mean_interval([3.0, 4.0])
    assert found.warnings == ["r3: not done, at step 25 of 40; the numbers are those of its last evaluation"]
    log = EventLog(paths[2] / "metrics.jsonl")
    log.write("failed", why="step 26: loss nan")
    log.close()
    assert "r3: failed at step 25 of 40 (step 26: loss nan);" in _only(paths).warnings[0]
    alone = _only(paths[2:])
    numbers = alone.entries[0].numbers
    assert (numbers["val_loss_nats"], numbers["best_val_loss_nats"], numbers["tokens"]) == (90.5, 90.5, 2500)
    assert "90.5" in _printed(alone, capsys)


def test_runs_are_compared_by_the_names_of_their_stages(tmp_path: Path) -> None:
    for run, lr in (("a", 0.1), ("b", 0.2)):
        _train(tmp_path, f"{run}/base", 3.0 - lr, lr=lr)
        _train(tmp_path, f"{run}/chat", 2.0 - lr, lr=lr)
    _train(tmp_path, "b/extra", 9.0)
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert [(c.stage, [g.label for g in c.groups]) for c in found] == [("base", ["a", "b"]), ("chat", ["a", "b"])]
    assert found[0].warnings == ["b/extra: no other run has a stage of that name, so it is not compared"]
    (one,) = compare([tmp_path / "a"])
    assert [g.label for g in one.groups] == ["base", "chat"]
    (mixed,) = compare([tmp_path / "a" / "base", tmp_path / "b" / "chat"])
    assert [g.label for g in mixed.groups] == ["a/base", "b/chat"]
    raw = (tmp_path / "a" / "base").resolve()
    assert [g.label for g in _only([raw, tmp_path / "b" / "base"]).groups][1] == "b/base"


def test_a_stage_that_only_some_stand_on_is_one_row_and_no_list_of_its_settings(tmp_path: Path) -> None:
    base = _train(tmp_path, "a/base", 3.0)
    _train(tmp_path, "a/dpo", 0.5, init=base, objective="dpo")
    found = _only([tmp_path / "a"])
    assert found.differing["base"] == [None, "train"]
    assert not [name for name in found.differing if name.startswith("base.")]
    assert found.differing["objective.kind"] == ["lm", "dpo"]
    assert any("the objectives differ (lm, dpo)" in warning for warning in found.warnings)
    _train(tmp_path, "a/small", 2.0, init=base, objective="distill")
    (likelihoods,) = compare([tmp_path / "a" / "base", tmp_path / "a" / "small"])
    assert not any("objectives differ" in warning for warning in likelihoods.warnings), "both losses are -ln p"


def _adapted(root: Path, run: str, loss: float, lr: float = 0.1) -> Path:
    """A run whose `chat` is an adapter upon an imported model, both measured by its card; the run's directory."""
    corpus = _stage(root, "corpus", {"_name": "clean", "sources": "notes"}, {})
    bpe = _stage(root, "tokenizer", {"_name": "bpe", "vocab": 300}, {"corpus:clean": corpus})
    start = _stage(root, "import", {"_name": "start", "path": "hf:model"}, {"tokenizer": bpe})
    atomic_json(start / "result.json", {"parameters": 300_000, "seconds": 1.0})
    chat = _train(root, f"{run}/chat", loss, init=start, lr=lr)
    card = _stage(root, "evaluate", {"_name": "card", "of": run}, {"model:start": start, "model:chat": chat.resolve()})
    row = {"task": "talk", "metric": "response_loss_nats", "n": 12}
    values = {"start": 3.25, "chat": loss}
    table = [{"model": m, "value": v, "low": v - 0.125, "high": v + 0.125, **row} for m, v in values.items()]
    (card / "table.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    for name, made in (("start", start), ("card", card)):
        (root / run / name).symlink_to(made)
    return root / run


def test_a_model_stands_beside_what_an_adapter_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after, on the same task; curves, settings and notes are those of what was trained."""
    run = _adapted(tmp_path, "a", 2.5)
    for paths in ([run], [run / "start", run / "chat"]):
        found = _only(paths)
        assert [g.label for g in found.groups] == ["start", "chat"]
        assert found.metric == "talk/response_loss_nats"
        assert found.differing == {}
        assert found.warnings == ["start was imported; chat began as it"]
    printed = _printed(found, capsys)
    assert "3.2500 (3.1250 to 3.3750)" in printed
    assert "2.5000 (2.3750 to 2.6250)" in printed
    page = write_comparison([found], tmp_path / "compare.html", "a").read_text()
    assert "3.2500 (3.1250 to 3.3750)" in page
    assert page.count("Validation loss by tokens") == 0
    assert json.loads(json.dumps(data(found)))["runs"][0]["numbers"]["parameters"] == 300_000


def test_two_adapters_stand_beside_the_model_that_both_began_as(tmp_path: Path) -> None:
    runs = [
        _adapted(tmp_path, "a", 2.5),
        _adapted(tmp_path, "b", 2.25, lr=0.2),
        _train(tmp_path, "c/chat", 2.0, lr=0.3),
    ]
    found = _only(runs)
    assert [g.label for g in found.groups] == ["a/start", "a", "b", "c"]
    assert found.differing["optim.lr"] == [0.1, 0.2, 0.3]
    assert found.metric == "val_loss_nats"  # nobody has evaluated c
    alone = _only(runs[2:])
    assert [g.label for g in alone.groups] == ["chat"]


def test_a_model_that_was_imported_is_not_left_out_silently(tmp_path: Path) -> None:
    _train(tmp_path, "a/base", 3.0)
    made = _stage(tmp_path, "import", {"_name": "llama"}, {})
    link = tmp_path / "imported" / "llama"
    link.parent.mkdir()
    link.symlink_to(made)
    assert f"{link}: no train stage there" in compare([link, tmp_path / "a"])[0].warnings[0]


def test_many_numbers_stand_below_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _train(tmp_path, "a/base", 3.0)
    _train(tmp_path, "b/base", 4.0, lr=0.2)
    model = {"model:base": path.resolve()}
    card = _stage(tmp_path, "evaluate", {"_name": "card"}, model)
    rows = [
        {"model": "base", "task": f"t{n}", "metric": "accuracy", "value": n / 8, "low": 0, "high": 1, "n": 5}
        for n in range(8)
    ]
    (card / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a" / "card").symlink_to(card)
    lines = _printed(_only([tmp_path / "a", tmp_path / "b"]), capsys).splitlines()
    assert any(line.split() == ["run", "a", "b"] for line in lines)
    assert any(line.startswith("t3/accuracy") and "0.3750" in line for line in lines)


def test_one_result_is_shown_once(tmp_path: Path) -> None:
    _train(tmp_path, "a/base", 3.0)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "base").symlink_to((tmp_path / "a" / "base").resolve())
    found = _only([tmp_path / "a", tmp_path / "b"])
    assert len(found.entries) == 1
    assert "the same results are shown once" in found.warnings[0]


def test_the_interval_of_an_evaluate_stage_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = _train(tmp_path, "a/base", 3.0)
    card = _stage(tmp_path, "evaluate", {"_name": "card"}, {"model:base": base.resolve()})
    row = {"model": "base", "task": "clean", "metric": "loss_nats", "value": 3.1, "low": 2.9, "high": 3.4, "n": 12}
    other = {**row, "model": "someone else", "value": 7.7}
    (card / "table.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (other, row)))
    (tmp_path / "a" / "card").symlink_to(card)
    found = _only([base])
    assert "clean/loss, nats" in headings(found)
    assert "3.1000 (2.9000 to 3.4000)" in _printed(found, capsys)
    assert _only([base], metric="clean/loss_nats").entries[0].numbers["clean/loss_nats"] == 3.1


def test_an_interval_over_documents_is_not_called_one_over_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three seeds, of which an evaluate stage has judged one."""
    stages = [_train(tmp_path, f"a{seed}/base", 3.0 + seed / 10, seed=seed) for seed in (1, 2, 3)]
    card = _stage(tmp_path, "evaluate", {"_name": "card"}, {"model:base": stages[0].resolve()})
    row = {"model": "base", "task": "clean", "metric": "loss_nats", "value": 3.1, "low": 2.9, "high": 3.4, "n": 12}
    (card / "table.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a1" / "card").symlink_to(card)
    shown = _printed(_only(stages), capsys)
    assert "3.1000 (2.9000 to 3.4000)" in shown
    assert "3.2000 ± " in shown


def test_json_is_plain_and_whole(tmp_path: Path) -> None:
    found = data(_only([_sweep(tmp_path, LOSSES)]))
    assert json.loads(json.dumps(found)) == found
    assert [r["seeds"] for r in found["runs"]] == [[1], [2], [3]] * 2
    assert found["groups"][0]["val_loss_nats"]["n"] == 3
    assert found["paired"][0]["from"] == "lr=0.1"


def test_metric_chooses_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, LOSSES)
    assert _only([sweep], "bits_per_byte").paired[0][2].mean == pytest.approx(-0.05)
    assert headings(_only([sweep], "tok_s"))[2] == "tok/s"
    with pytest.raises(UserError, match=r"--metric val_los: no run has it; did you mean 'val_loss_nats'\?"):
        compare([sweep], "val_los")


def test_nothing_to_compare_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no stage and no run with started stages"):
        compare([tmp_path / "nowhere"])
    _train(tmp_path, "a/base", 3.0)
    corpus = next((tmp_path / "stages").glob("corpus-*"))
    with pytest.raises(UserError, match="no train stage has started there"):
        compare([corpus])


def test_a_run_that_got_worse_is_red_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [_train(tmp_path / "runs", f"{name}/base", 2.0, lr=lr) for name, lr in (("a", 1.0), ("b", 0.1), ("c", 0.2))]
    said = {"a": "worse", "b": "nothing learned", "c": "learned"}
    for path, (name, verdict) in zip(paths, said.items(), strict=True):
        result = json.loads((path / "result.json").read_text())
        atomic_json(path / "result.json", {**result, "verdict": verdict, "verdict_sentence": f"loss of {name}"})
    found = _only(paths)
    assert {run["verdict_sentence"]: run["verdict"] for run in data(found)["runs"]} == {
        f"loss of {name}": verdict for name, verdict in said.items()
    }
    page = write_comparison([found], tmp_path / "compare.html", "runs").read_text()
    badges = re.findall(r'<span class="badge (\w+)">([^<]+)</span> [^<]*(loss of \w)<', page)
    assert badges == [("bad", "worse", "loss of a"), ("warn", "nothing learned", "loss of b")]
    printed = _printed(found, capsys)
    assert "loss of a" in printed
    assert "loss of b" in printed
    assert "loss of c" not in printed


def test_the_page_stands_alone_and_groups_what_has_no_colour_left(tmp_path: Path) -> None:
    losses = {(round(0.1 * i, 1), seed): 10.0 - i + seed / 10 for i in range(1, 13) for seed in (1, 2)}
    found = _only([_sweep(tmp_path, losses)])
    page = write_comparison([found], tmp_path / "compare.html", "runs/lrs").read_text()
    assert "http" not in page
    legend = re.findall(r'swatch s(\d)"></i>([^<]*)<', page.split("Validation loss<")[1].split("<svg")[0])
    assert [name for _, name in legend] == [*(f"lr={lr}" for lr in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)), "5 others"]
    assert [n for n, _ in legend] == list("01234567")
    style = page.split("</style>")[0]
    assert all(f".s{n} {{" in style for n in range(8))
    assert page.count("<path") >= 24  # every run is drawn
    assert len(rows(found)) == 12
    assert len(rows(found, per_run=True)) == 24
    assert "Each run" in page


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [(3, 7, (3, 7)), (3, 8, (8, 3)), (2, 40, (40, 2)), (30, 12, (30, 12))],
)
def test_a_wide_table_is_turned_so_that_a_page_shows_all_of_it(rows: int, columns: int, shape: tuple[int, int]) -> None:
    lines = [[f"{row},{column}" for column in range(columns)] for row in range(rows)]
    turned = narrow(lines)
    assert (len(turned), len(turned[0])) == shape
    assert sorted(cell for line in turned for cell in line) == sorted(cell for line in lines for cell in line)
