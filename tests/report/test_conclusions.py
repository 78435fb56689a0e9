"""The conclusions of the page: which number, which verdict, against which yardsticks."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import atomic_json
from ingot.core.events import EventLog
from ingot.report.html.conclusions import conclusions, group, position, unfinished

YARDSTICKS = {"uniform guess": 8.0, "gzip -9": 2.31, "xz -9": 1.75}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "below xz -9 (1.75)"),
        (1.9, "below gzip -9 (2.31) and above xz -9 (1.75)"),
        (2.31, "below uniform guess (8.00) and above gzip -9 (2.31)"),
        (9.0, "above uniform guess (8.00)"),
    ],
)
def test_a_value_stands_between_its_yardsticks(value: float, words: str) -> None:
    assert position(value, YARDSTICKS) == words


def _table(stage: Path, models: list[str], rows: list[dict[str, Any]]) -> None:
    inputs = {f"model:{m}": {"name": m, "key": m, "dir": ""} for m in models}
    atomic_json(stage / "inputs.json", {"inputs": inputs, "settings": {"against": "chat"}})
    (stage / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(model: str, task: str, metric: str, value: float, spread: float = 0.0) -> dict[str, Any]:
    interval = {"low": value - spread, "high": value + spread}
    return {"model": model, "task": task, "metric": metric, "value": value, **interval, "n": 50}


@pytest.mark.parametrize(
    ("value", "tone", "verdict"),
    [(1.5, "good", "below all"), (1.9, "", "between"), (3.0, "warn", "weak"), (8.5, "warn", "weak")],
)
def test_bits_per_byte_are_measured_against_compressors(tmp_path: Path, value: float, tone: str, verdict: str) -> None:
    rows = [_row(m, "clean", "bits_per_byte", v) for m, v in YARDSTICKS.items()]
    rows += [_row("chat", "clean", "bits_per_byte", value + 1), _row("base", "clean", "bits_per_byte", value)]
    _table(tmp_path, ["base", "chat"], rows)
    (line,) = conclusions("evaluate", "card", tmp_path)
    assert (line.tone, line.verdict, line.number) == (tone, verdict, f"{value:.3f}")
    assert line.sentence.endswith(f"base is {position(value, YARDSTICKS)}; chat {value + 1:.3f}")


@pytest.mark.parametrize(("spread", "verdict"), [(0.1, "above chance"), (0.3, "as by chance")])
def test_an_accuracy_is_measured_against_guessing(tmp_path: Path, spread: float, verdict: str) -> None:
    rows = [_row("base", "sums", "accuracy", 0.5, spread), _row("base", "sums", "chance", 0.25)]
    _table(tmp_path, ["base"], rows)
    (line,) = conclusions("evaluate", "card", tmp_path)
    assert (line.verdict, line.number) == (verdict, "50.0 %")
    assert "guessing gives 25.0 %" in line.sentence


def test_an_accuracy_says_what_each_stage_of_training_added(tmp_path: Path) -> None:
    rows = [_row(m, "sums", "accuracy", v) for m, v in (("dpo", 0.75), ("base", 0.0), ("ppo", 0.5), ("chat", 0.625))]
    _table(tmp_path, ["base", "chat", "dpo", "ppo"], rows)
    chains = [[{"name": name, "learned": []} for name in ("base", "chat", last)] for last in ("ppo", "dpo")]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"event": "chain", "time": 0, "stages": stages}) + "\n" for stages in chains)
    )
    (line,) = conclusions("evaluate", "card", tmp_path)
    assert line.sentence.endswith("base 0.0 %, chat 62.5 % (+62.5), ppo 50.0 % (-12.5), dpo 75.0 % (+12.5)")


@pytest.mark.parametrize(
    ("rate", "tone", "verdict"), [(0.7, "good", "better"), (0.55, "", "no difference"), (0.2, "bad", "worse")]
)
def test_a_win_rate_says_whether_chance_explains_it(tmp_path: Path, rate: float, tone: str, verdict: str) -> None:
    _table(tmp_path, ["dpo"], [_row("dpo", "length", "win_rate", rate, 0.1)])
    (line,) = conclusions("judge", "verdict", tmp_path)
    assert (line.tone, line.verdict, line.number) == (tone, verdict, f"{100 * rate:.0f} %")


def _evaluations(stage: Path, field: str, values: list[float]) -> None:
    log = EventLog(stage / "metrics.jsonl")
    log.write("plan", steps=10 * len(values))
    for number, value in enumerate(values):
        log.write("evaluation", step=10 * number, **{field: value})
        log.write("step", step=10 * number + 1, loss_nats=1.0)
    log.close()


@pytest.mark.parametrize(
    ("kept", "dropped", "unreadable", "tone", "words"),
    [
        (
            90,
            {"too_few_words": 8, "exact_duplicate": 2},
            0,
            "",
            "the most frequent reason to drop one was “too few words”",
        ),
        (90, {}, 10, "", "10 could not be read"),
        (30, {"language": 70}, 0, "warn", "“language”"),
    ],
)
def test_a_corpus_says_what_was_dropped(
    tmp_path: Path, kept: int, dropped: dict[str, int], unreadable: int, tone: str, words: str
) -> None:
    counts = {reason: {"documents": n} for reason, n in dropped.items()}
    funnel = {"in": {"documents": 100}, "kept": {"documents": kept, "clean_bytes": 5000}, "dropped": counts}
    atomic_json(tmp_path / "funnel.json", {**funnel, "quarantined": {"documents": unreadable}})
    (line,) = conclusions("corpus", "clean", tmp_path)
    assert (line.tone, line.number) == (tone, str(kept))
    assert line.sentence.startswith("of 100 documents kept: 5.0 kB of clean text")
    assert line.sentence.endswith(words)


@pytest.mark.parametrize(
    ("field", "tone", "verdict"),
    [
        ("val_loss_nats", "good", "learned"),
        ("val_loss_nats", "warn", "nothing learned"),
        ("val_reward", "bad", "worse"),
        ("val_reward", "", "not measured"),
    ],
)
def test_a_training_learned_or_did_not(tmp_path: Path, field: str, tone: str, verdict: str) -> None:
    said = {"verdict": verdict, "verdict_sentence": "what the stage said"}
    atomic_json(tmp_path / "result.json", {field: 0.51, "tokens": 4000, "parameters": 100, **said})
    (line,) = conclusions("train", "base", tmp_path)
    assert (line.tone, line.verdict, line.number) == (tone, verdict, "0.5100")
    where, _, rest = line.sentence.partition("; ")
    assert "on all held-out" in where  # the number's; the verdict's are those of a sample, which differ
    sample = "" if verdict == "not measured" else "on those read while training: "
    assert rest == f"{sample}what the stage said; 100 parameters, 4k tokens trained on"


def test_an_unfinished_stage_says_how_far_it_is(tmp_path: Path) -> None:
    assert unfinished("card", "running", "another process", tmp_path / "card") == ("card", "", "running", "–", "")
    _evaluations(tmp_path, "val_loss_nats", [8.0, 6.0])
    line = unfinished("base", "failed", "step 12: loss nan", tmp_path)
    assert (line.tone, line.number) == ("bad", "55 %")
    assert line.sentence == "step 12: loss nan; validation loss 8.0000 at the start, 6.0000 so far"


def test_results_stand_apart_from_training_and_data() -> None:
    assert [group(kind) for kind in ("judge", "train", "label", "corpus")] == [
        "Results",
        "Training",
        "Training",
        "Data",
    ]
