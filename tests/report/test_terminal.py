"""What the commands print, and the data behind it."""

import json
from pathlib import Path

from ingot.pipeline.status import status
from ingot.report import figures, terminal
from ingot.report.html import panels_forgetting
from ingot.report.html.page import write_report
from ingot.report.runs import print_runs, run_rows
from tests.imports import assert_not_imported


def test_stage_lines_go_to_standard_error(finished, capsys):
    node = finished.graph.nodes["chat"]
    now = status(finished.graph, node)
    terminal.stage_line(node, now, None)
    terminal.stage_line(node, now, {"seconds": 81.24})
    worse = {"verdict": "worse", "verdict_sentence": "reward 0.33 → 0.04 in 200 updates: worse than the start"}
    terminal.stage_line(node, now, {"seconds": 81.24, **worse})
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert first.split()[:2] == ["chat", "RESUME"]
    assert second.split(maxsplit=1) == ["chat", "done in 81.2 s"]
    assert third.split(maxsplit=1) == ["chat", f"done in 81.2 s; {worse['verdict_sentence']}"]


def test_status_of_a_stage_under_way(finished, capsys):
    rows = {row["name"]: row for row in terminal.status_rows(finished.graph)}
    assert (rows["chat"]["step"], rows["chat"]["steps"]) == (25, 40)
    assert rows["chat"]["eta_s"] is None  # nobody is running it
    assert rows["base"]["val_loss_nats"] == 1.5114  # as the result has it: of all held-out rows
    assert (rows["chat"]["val_loss_nats"] or 0) > 0  # the last evaluation's
    with finished.dir("chat").lock():
        running = {row["name"]: row for row in terminal.status_rows(finished.graph)}["chat"]
    assert running["state"] == "RUNNING"
    assert running["eta_s"] == 15  # as the newest step logged it
    terminal.print_status(list(rows.values()))
    assert "25 / 40" in capsys.readouterr().out


def test_status_of_nothing(empty):
    assert {row["state"] for row in terminal.status_rows(empty.graph)} == {"RUN"}


def test_end_names_the_numbers_and_the_report(finished, capsys):
    terminal.print_end(finished.graph, write_report(finished.graph, None))
    shown = capsys.readouterr().out
    assert (
        "base: validation loss 1.5114 nats, perplexity 4.5, 1.8421 bits per byte; 6.6M tokens trained on in 81.2 s"
        in shown
    )
    assert "bits per byte on held-out clean: uniform guess 3.2000, gzip -9 1.9700, xz -9 1.6400, base 1.8421" in shown
    assert "base writes:\n  def main(" in shown
    *_, report, next_command = shown.splitlines()
    assert report == f"report  {finished.root / 'small' / 'report.html'}"
    assert next_command == f'next    ingot generate {finished.root / "small" / "base"} "TEXT"'  # chat has not finished


def test_an_answer_begins_a_line_and_a_continuation_does_not(tmp_path: Path) -> None:
    for answer, text in ((True, "Why?\n  Because."), (False, "Why?Because.")):
        sample = {"step": 0, "model": "chat", "prompt": "Why?", "text": "Because.", "answer": answer}
        stage = tmp_path / str(answer)
        stage.mkdir()
        (stage / "metrics.jsonl").write_text(json.dumps({"event": "sample", **sample}) + "\n")
        assert [str(line) for line in terminal.RESULT_LINES["evaluate"]("card", stage)] == ["chat writes:", f"  {text}"]


def test_runs_are_listed_with_the_verdict_of_their_last_training(finished, capsys):
    """Not with the numbers of `card`, which is done and comes later."""
    rows = run_rows(finished.root)
    small = next(row["decides"] for row in rows if row["name"] == "small")
    learned = "validation loss 5.714 → 1.513 in 400 updates: learned"
    assert small == {"stage": "base", "verdict": "learned", "number": "1.5114", "sentence": learned}
    print_runs(rows, finished.root)
    assert f"base: {learned}" in capsys.readouterr().out


def test_trace(capsys):
    piece = {"source": "s", "path": "a/[b].py", "offset": 12, "first_token": 3, "tokens": 4, "text": "x = [1]"}
    terminal.print_trace([{"source": "clean", "row": 1234, "pieces": [piece], "ids": [1, 2, 3, 4]}], 7)
    shown = capsys.readouterr().out
    assert "step 7: clean, row 1,234: 1 document, 4 tokens" in shown
    assert "a/[b].py at 12, tokens 3 to 6" in shown
    assert "x = [1]" in shown
    terminal.print_trace([], 7, "skipped, because the loss is not finite")
    assert capsys.readouterr().out == "step 7: skipped, because the loss is not finite\n"


def test_no_torch():
    assert_not_imported("import ingot.report.terminal, ingot.report.inspect.inspect", "torch")


def test_d6_status_and_page_tell_a_changed_verdict(tmp_path):
    from ingot.report.html.panels import panel
    from ingot.report.terminal import _health

    assert _health(tmp_path) == "healthy"
    step = {"event": "step", "time": 0, "attempt": 1, "loss_nats": 3.0, "grad_norm": 0.5, "lr": 1e-3, "tok_s": 9}
    lines = [{**step, "step": 1}, *({**step, "event": "health", "step": s, "health": h} for s, h in CHANGES)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _health(tmp_path) == "always clipped"
    assert "While training: always clipped at step 100, healthy at step 300, always clipped at step 900." in panel(
        "train", tmp_path
    )


def test_the_panel_says_what_the_guard_did(tmp_path: Path) -> None:
    from ingot.report.html.panels import panel

    step = {"event": "step", "time": 1.0, "attempt": 1, "step": 1, "loss_nats": 3.0, "grad_norm": 0.5, "lr": 1e-3}
    names = [f"text notes/{i}.txt 0" for i in range(5)]
    skipped = [{**step, "event": "skipped", "step": n, "why": "too <far>", "documents": names} for n in (98, 157)]
    spike = {
        **step,
        "event": "rollback",
        "step": 157,
        "first": 82,
        "to": 80,
        "why": "step 157: loss 9",
        "documents": [],
    }
    flip = {**step, "event": "rollback", "step": 203, "to": 200, "why": "a bit flipped in model.norm.weight"}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [step, *skipped, spike, flip]))
    page = panel("train", tmp_path)
    done = (
        "2 steps skipped, the last one 157; back to step 80, without steps 82 to 157; back to step 200, because a bit"
    )
    assert f"Guard: {done} flipped." in page
    journal = page[page.index("Journal of the guard") :]
    cells = "<td>skipped<td>too &lt;far&gt;<td>text notes/0.txt 0, text notes/1.txt 0, text notes/2.txt 0 and 2 more"
    assert cells in journal
    assert [journal.index(word) for word in ("98", "157", "203")] == sorted(map(journal.index, ("98", "157", "203")))
    assert "<td>back to step 200, because a bit flipped<td>a bit flipped in model.norm.weight<td>" in journal


CHANGES = ((100, "always clipped"), (300, "healthy"), (900, "always clipped"))


def test_what_a_loss_comes_to_goes_by_what_was_learned() -> None:
    assert figures.describe_loss({"val_loss_nats": 1.0}) == "perplexity 2.7"
    assert figures.describe_loss({"val_loss_nats": 0.2, "val_accuracy": 0.9388}) == "93.9 % of held-out pairs right"
    assert (
        figures.describe_loss({"val_loss_nats": 0.2, "val_rewards/accuracy": 1.0}) == "100.0 % of held-out pairs right"
    )


def test_forgetting_is_told_as_before_and_now() -> None:
    """A loss that forgetting raises, and an accuracy that it lowers."""
    row = {"value": 0.1, "low": 0.05, "high": 0.2, "n": 9, "css": "bad"}
    loss, accuracy = {"name": "old", "metric": "loss, nats"}, {"name": "sums", "metric": "accuracy"}
    assert panels_forgetting._before_and_now(loss, 2.5, row) == (
        "validation loss on old was 2.4000 nats at best before and is 2.5000 now, +0.1000 (+0.0500 to +0.2000): worse"
    )
    assert panels_forgetting._before_and_now(accuracy, 0.5, row) == (
        "accuracy on sums was 0.6000 at best before and is 0.5000 now, -0.1000 (-0.2000 to -0.0500): worse"
    )
    unclear = row | {"low": -0.3, "css": ""}
    assert panels_forgetting._before_and_now(loss, 2.5, unclear).endswith("(-0.3000 to +0.2000): no clear change")


def test_one_document_has_no_interval_and_equal_ones_have_one_without_width() -> None:
    row = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert panels_forgetting.with_interval({**row, "n": 1}) == "+1.0000 (no interval, n = 1)"
    assert panels_forgetting.with_interval({**row, "n": 200}) == "+1.0000 (+1.0000 to +1.0000)"
    found = [panels_forgetting._with_css({**row, "n": n}) for n in (1, 200)]
    assert [one and one["css"] for one in found] == ["", "bad"]
