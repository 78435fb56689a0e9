"""The harness of the proofs, and the cheapest of them with one seed, some at half their steps."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from proofs.__main__ import main, proofs
from proofs.c2_filtering import SIZE, at_random, in_place, mixed, stream
from proofs.d2_fixed_points import PROOF as D2
from proofs.e3_consolidation import PROOF as E3
from proofs.e3_consolidation import a_at_equal_b
from proofs.e3_consolidation import figure as frontiers
from proofs.g2_groups import PROOF as G2
from proofs.i1_rounds import Pairs, gold
from proofs.letters import REVERSE, strings
from proofs.p1_frontier import PROOF as P1
from proofs.p1_frontier import best_reward, closed_form, figure
from proofs.p4_hacking import closed_form as hacked
from proofs.p4_hacking import evaluate
from proofs.page import page
from proofs.proof import Arm, Gate, Results
from proofs.r1_reward import PROOF as R1
from proofs.r2_limits import PROOF as R2

from proofs import k4_on_policy
from proofs import proof as results


def _judge(proof, names, **size):
    """Run arms with seed 1; each comes out as it should."""
    arms = {arm.name: arm for arm in proof.arms}
    for name in names:
        numbers = proof.run(1, name, **size)
        assert arms[name].passes(numbers), (name, numbers)


def test_G2_enumeration():
    _judge(G2, [arm.name for arm in G2.arms])


@pytest.mark.slow
@pytest.mark.long
def test_D2_fixed_points():
    _judge(D2, ["ipo", "cdpo", "dpo as ipo", "dpo as cdpo"])


@pytest.mark.long
def test_R1_a_reward_model_recovers_the_reward():
    _judge(R1, ["std 2"])
    _judge(R1, ["choices shuffled"], steps=40)


@pytest.mark.slow
@pytest.mark.long
def test_R2_a_reward_model_stays_at_the_limit():
    _judge(R2, ["std 1"])
    _judge(R2, ["a mark tells"], steps=40)


@pytest.mark.slow
def test_P1_ppo_reaches_the_frontier():
    _judge(P1, ["beta 0.5", "reward flipped"])


def test_P1_the_closed_form_is_the_table():
    table = {1: (2.238, 0.681), 0.5: (4.108, 3.520), 0.35: (5.706, 7.378), 0.25: (7.091, 12.03)}
    for beta, known in table.items():
        assert closed_form(beta) == pytest.approx(known, abs=6e-3)
        assert best_reward(known[1]) == pytest.approx(known[0], abs=6e-3)


def test_P4_the_closed_form_has_its_peak_where_the_note_says():
    biased = [hacked(beta)[2] for beta in (1000, 0.25, 0.03)]
    assert biased == pytest.approx([0.77, 3.727, 1.6], abs=2e-3)
    honest = [hacked(beta, bias=0.0)[2] for beta in (1000, 1, 0.5, 0.25, 0.1, 0.03)]
    assert honest == sorted(honest)  # by its own reward, more KL is never worse
    # The best policy of a price has the most proxy less what its KL costs: those of other prices have less.
    values = [hacked(beta)[1] - 0.25 * hacked(beta)[0] for beta in (0.2, 0.25, 0.3)]
    assert max(values) == values[1]


def test_P4_what_is_judged_is_the_fall_of_gold_and_when_it_was_told():
    def log(gold):
        flat = {"kl_nats": [1.0] * 100, "completion_tokens": [3.0] * 100}
        return {"reward": [0.1 * t for t in range(100)], "gold_reward": gold, **flat}

    falls = evaluate(log([min(t, 60 - t) * 0.1 for t in range(50)] + [1.0] * 50))
    assert falls["proxy's largest fall"] == 0
    assert falls["gold lost"] == pytest.approx(2 / 3, abs=0.1)
    assert falls["peak"] == 30
    assert 30 <= falls["steps without alarm"] <= 40
    stays = evaluate(log([min(t, 30) * 0.1 for t in range(100)]))
    assert (stays["gold lost"], stays["steps without alarm"]) == (0, 100)
    assert stays["gold lost at the alarm"] == 1


def test_I1_gold_and_the_accuracy_of_bayes():
    answers = np.array([[0, 0, 0, 1, 1, 1, 2, 2], [0] * 8, [3] * 8, [1, 0, 2, 2, 2, 2, 2, 2]])
    assert gold(answers).tolist() == [7.5, -3.0, 0.0, 2.5]
    draw = np.random.default_rng(0)
    pairs = Pairs.label(draw.integers(0, 8, (8000, 8)), draw)
    chosen = gold(pairs.answers).reshape(-1, 2)
    better = np.mean(chosen[:, 0] > chosen[:, 1]) + 0.5 * np.mean(chosen[:, 0] == chosen[:, 1])
    assert better == pytest.approx(pairs.bayes, abs=0.02)


def test_E3_frontiers_are_compared_where_B_is_as_good():
    points = [(0.9, 0.5), (0.5, 0.9), (0.1, 1.0)]  # A and B
    assert a_at_equal_b(points, 0.7) == pytest.approx(0.7)
    assert a_at_equal_b(points, 0.95) == pytest.approx(0.3)
    assert a_at_equal_b(points, 0.4) == 0.9
    assert a_at_equal_b(points[:2], 0.99) == 0.5  # no point is as good: the nearest, which is a favour to it
    assert a_at_equal_b([(0.2, 0.8), (0.6, 0.95)], 0.8) == 0.6  # a better B is no handicap


def test_C2_streams_are_equally_long_and_the_control_keeps_the_fraction_of_damaged_text():
    draw = np.random.default_rng(0)
    texts = [" ".join(f"{draw.integers(10**9):09}" for _ in range(SIZE))[:SIZE] for _ in range(40)]
    mixture, is_clean = mixed(texts, draw)
    assert [text in texts for text in mixture] == is_clean.tolist()
    assert (is_clean.sum(), {*map(len, mixture)}) == (20, {SIZE})
    random = at_random(is_clean, is_clean, draw)
    assert (random.sum(), is_clean[random].sum()) == (20, 10)
    for kept in (is_clean, random):
        ids = in_place(mixture, kept, draw)
        assert len(ids) == len(stream(mixture))
        placed = bytes(ids.astype(np.uint8)).decode().split("\0")
        assert [placed[i] for i in np.flatnonzero(kept)] == [mixture[i] for i in np.flatnonzero(kept)]
        assert {mixture[i]: 2 for i in np.flatnonzero(kept)} == Counter(placed)


def test_a_gate_holds_between_its_borders_and_never_for_a_nan():
    gate = Gate("x", 1, 2)
    assert [gate.holds({"x": x}) for x in (0.9, 1, 2, 2.1, math.nan)] == [False, True, True, False, False]
    arm, control = Arm("a", [gate]), Arm("c", [gate], control=True)
    assert arm.passes({"x": 1.5})
    assert not control.passes({"x": 1.5})
    assert control.passes({"x": 3})
    assert arm.worst([{"x": 1.4}, {"x": 1.9}, {"x": 1.5}], gate) == 1.9


def test_a_result_is_kept_until_what_made_it_changes(tmp_path, capsys, monkeypatch):
    command = ["proofs", "G2", "--seeds", "1", "--results", str(tmp_path), "--to", str(tmp_path / "PROOFS.md")]
    monkeypatch.setattr("sys.argv", command)
    assert main() == 0
    kept = sorted(tmp_path.glob("G2.*.json"))
    assert len(kept) == 3
    times = [file.stat().st_mtime_ns for file in kept]
    assert main() == 0
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("G2.*.json"))] == times
    arm = G2.arms[0]
    assert G2.key(arm, 1) not in {G2.key(arm, 2), G2.key(G2.arms[1], 1)}
    assert G2.key(Arm(arm.name, []), 1) == G2.key(arm, 1)  # gates judge, and decide no result
    text = (tmp_path / "PROOFS.md").read_text()
    assert "| G2 |" in text
    assert "0.6667" in text
    assert "divided by the spread misses" in text
    assert text.count("not run") > 10


def test_a_result_belongs_to_all_code_that_its_proof_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_ROOTS", {"rooms": tmp_path})
    monkeypatch.setattr(results, "_IGNORED", ("rooms.shown",))
    files = {name: tmp_path / f"{name}.py" for name in ("start", "near", "far", "shown", "alone")}
    files["start"].write_text("from rooms.near import x\nfrom rooms import shown\n")
    files["near"].write_text("def x():\n    import rooms.far\n")
    for name in ("far", "shown", "alone"):
        files[name].write_text("y = 1\n")

    def changed(name, text):
        before = results._imported(files["start"])
        files[name].write_text(text)
        results._module.cache_clear()
        return results._imported(files["start"]) != before

    assert set(results._imported(files["start"])) == {"rooms.near", "rooms.far"}
    assert changed("far", "y = 2\n")
    assert not changed("far", "y = 2  # a comment\n")
    assert not changed("shown", "y = 2\n")
    assert not changed("alone", "y = 2\n")


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, monkeypatch):
    for workers in "12":
        command = ["proofs", "G2", "--seeds", "2", "--workers", workers, "--results", str(tmp_path / workers)]
        monkeypatch.setattr("sys.argv", command)
        assert main() == 0
    one, two = ({f.name: json.loads(f.read_text())["numbers"] for f in (tmp_path / w).iterdir()} for w in "12")
    assert len(one) == 6
    assert one == two


def test_every_proof_has_a_control_and_names_of_its_own():
    every = proofs()
    assert len({p.id for p in every}) == len(every)
    for proof in every:
        assert {arm.control for arm in proof.arms} == {True, False}, proof.id
        assert len({arm.name for arm in proof.arms}) == len(proof.arms)


def test_a_picture_is_an_svg_document(tmp_path):
    from xml.etree import ElementTree

    found = {arm.name: [{"kl": 0.5, "reward": 2.0}] for arm in P1.arms}
    assert ElementTree.fromstring(figure(found)).tag.endswith("svg")
    sweeps = {"ewc": [(0.9, 0.5), (0.5, 0.9)], "l2sp": [(0.5, 0.5), (0.1, 0.9)]}
    found = {arm.name: [{"A": 0.5, "B": 0.9} | (sweeps if arm.name == "ewc" else {})] * 2 for arm in E3.arms}
    assert ElementTree.fromstring(frontiers(found)).tag.endswith("svg")


def test_the_page_says_what_was_not_run_and_why_a_gate_is_where_it_is(tmp_path):
    page([P1, E3], Results(tmp_path), [1], tmp_path / "PROOFS.md")
    written = (tmp_path / "PROOFS.md").read_text()
    assert "beta 1: not run" in written
    assert "\n30 <= Fisher / empirical: 99 if every letter had probability .99; some have less.\n" in written


def test_K4_the_teacher_knows_the_right_letter_whatever_was_written():
    prompts, answers = strings(REVERSE, 5, k4_on_policy.LENGTH, np.random.default_rng(1))
    wrong = np.full_like(answers, 7)
    logp_BTV = k4_on_policy.Rule().logp(torch.from_numpy(np.concatenate([prompts, wrong], 1)))
    torch.testing.assert_close(logp_BTV.exp().sum(-1), torch.ones(logp_BTV.shape[:2]))
    first = prompts.shape[1] - 1
    found = logp_BTV[:, first : first + answers.shape[1]]
    np.testing.assert_array_equal(found.argmax(-1), answers)
    assert float(found.amax().exp()) == pytest.approx(k4_on_policy.RIGHT)
