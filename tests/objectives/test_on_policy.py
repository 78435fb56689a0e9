"""Rollouts and the updates made of them (ALGORITHMS 2.0, 2.3, 2.4), through the engine."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.core.events import EventLog, read_events, stable
from ingot.data.batches import Batch, append_answers
from ingot.model.losses import token_logps, token_logps_and_entropies
from ingot.objectives.replay import Replay
from ingot.objectives.reward_functions import Scorer, call_reward_function
from ingot.objectives.rollout import roll_out
from ingot.train.loop import train, update_best
from tests.objectives.rl_helpers import STOP, Letters, count_a, grpo, play, policy, ppo, prompts, ragged_prompts

METHODS = {
    "ppo": lambda **o: ppo(max_new=6, **o),
    "ppo, entropy and a KL in the loss": lambda **o: ppo(max_new=6, entropy=0.1, kl="k2-loss", **o),
    "grpo": lambda **o: grpo(max_new=6, group=4, **o),
    "grpo as published": lambda **o: grpo(
        max_new=6, group=4, aggregation="sequence", standardise=True, beta=0.1, kl="k3-loss", **o
    ),
    "dr grpo": lambda **o: grpo(max_new=6, group=4, aggregation="constant", **o),
    "gspo": lambda **o: grpo(max_new=6, group=4, ratio="sequence", epochs=2, clip_high=0.28, **o),
    "rloo with a KL in the reward": lambda **o: grpo(max_new=6, group=4, baseline="others", beta=0.1, **o),
}


def _expanded(engine, raw, step=1):
    return list(engine._expand(raw, engine.context(step)))


# -- rollouts ----------------------------------------------------------------------------------------------------------


def test_2_3_a_completion_ends_with_the_first_stop_token_which_is_learned(tmp_path):
    engine = play(ppo(max_new=8), tmp_path)
    raw = ragged_prompts(32)
    rollout = roll_out(raw, engine.context(1), samples=2, max_new=8, temperature=1.0)
    batch = rollout.batch
    assert 0 < rollout.truncated_B.sum() < 64
    for row, completion in enumerate(rollout.completions):
        start = int(raw.columns["lengths_B"][row // 2])
        ids = completion.ids
        assert (STOP in ids) == (not rollout.truncated_B[row])
        assert STOP not in ids[:-1]
        assert batch.columns["lengths_B"][row] == start + len(ids)
        assert batch.ids_BT[row, :start].tolist() == raw.ids_BT[row // 2, :start].tolist()
        assert batch.ids_BT[row, start : start + len(ids)].tolist() == ids.tolist()
        labels = batch.labels_BT[row]
        assert labels[start - 1 : start - 1 + len(ids)].tolist() == ids.tolist()
        assert (labels != batch.ignore).sum() == len(ids)
    assert len({tuple(c.ids) for c in rollout.completions}) > 32  # samples of a prompt differ


def test_2_3_draws_are_others_at_each_step_and_place_and_the_same_again(tmp_path):
    engine = play(ppo(max_new=8), tmp_path)
    raw = prompts([[1, 2]] * 12)

    def drawn(step):
        rollout = roll_out(raw, engine.context(step), samples=1, max_new=8, temperature=1.0)
        return [tuple(c.ids.tolist()) for c in rollout.completions]

    assert drawn(1) == drawn(1)
    assert len(set(drawn(1))) > 6
    assert sum(a == b for a, b in zip(drawn(1), drawn(2), strict=True)) < 6


def test_2_3_answers_stand_behind_their_prompts():
    batch = append_answers(prompts([[5, 6], [7]]), [np.array(a) for a in ([1, 2], [3], [1, 0], [2, 2, 2])], 2)
    assert batch.columns["lengths_B"].tolist() == [4, 3, 3, 4]
    assert batch.ids_BT.tolist() == [[5, 6, 1, 2], [5, 6, 3, 0], [7, 1, 0, 0], [7, 2, 2, 2]]
    i = batch.ignore
    assert batch.labels_BT.tolist() == [[i, 1, 2, i], [i, 3, i, i], [1, 0, i, i], [2, 2, 2, i]]
    assert batch.row_B.tolist() == [0, 0, 1, 1]
    assert batch.counts() == {"token": 8, "sequence": 4}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_2_3_canaries_of_the_first_update(tmp_path, method, temperature):
    """Ratio 1, nothing clipped, KL(policy || itself) 0; KL from the reference 0 at step 0; sampler against trainer."""
    objective = METHODS[method](temperature=temperature)
    metrics = play(objective, tmp_path, lr=0.0).step(ragged_prompts()).others
    if method in ("grpo", "grpo as published", "dr grpo"):  # one update, which has nothing to compare itself with
        assert not {"first_ratio", "approx_kl", "clip_fraction"} & set(metrics)
    else:
        assert float(metrics["first_ratio"]) == pytest.approx(1, abs=1e-6)
        assert float(metrics["approx_kl"]) == pytest.approx(0, abs=1e-9)
        assert float(metrics["clip_fraction"]) == 0
    assert float(metrics["sampler_gap"]) < 1e-4
    if objective.settings.beta:
        assert float(metrics["kl_nats"]) == 0
    assert 0 < metrics["entropy_nats"] < math.log(8)


def test_2_3_canary_control_a_temperature_missing_in_the_trainer_shows(tmp_path):
    objective = ppo(max_new=6, temperature=0.5)
    objective.logps = lambda out, batch: token_logps(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)
    assert float(play(objective, tmp_path, lr=0.0).step(ragged_prompts()).others["sampler_gap"]) > 0.1


def test_2_3_after_an_update_ratios_move_and_are_clipped(tmp_path):
    metrics = play(ppo(max_new=6, epochs=4), tmp_path, lr=0.05).step(ragged_prompts()).others
    assert float(metrics["approx_kl"]) > 1e-3
    assert 0 < float(metrics["clip_fraction"]) < 1
    assert float(metrics["first_ratio"]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_2_3_the_first_ratio_shows_a_trainer_that_changes_its_mind(tmp_path, method):
    """The control of the two tests around: log-probabilities of the update that are not those of before it."""
    objective = METHODS[method](epochs=2, beta=0.0)
    logps, asked = objective.logps, []

    def wavering(out, batch):
        asked.append(batch)
        return logps(out, batch) - 0.5 * (len(asked) > 1)

    objective.logps = wavering
    metrics = play(objective, tmp_path, lr=0.0).step(ragged_prompts()).others
    assert float(metrics["first_ratio"]) < 0.7
    assert float(metrics["approx_kl"]) > 0.05


@pytest.mark.parametrize("method", ["ppo", "grpo as published"])
def test_2_3_canaries_in_bf16(tmp_path, method):
    metrics = play(METHODS[method](epochs=2), tmp_path, precision="bf16", lr=0.0).step(ragged_prompts()).others
    assert float(metrics["first_ratio"]) == pytest.approx(1, abs=1e-4)
    assert float(metrics["approx_kl"]) == pytest.approx(0, abs=1e-6)
    assert float(metrics["sampler_gap"]) < 2e-2


def test_2_3_dropout_is_off(tmp_path):
    engine = play(ppo(max_new=6), tmp_path, model=policy(dropout=0.3), lr=0.0)
    assert float(engine.step(ragged_prompts()).others["sampler_gap"]) < 1e-4


# -- normalisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
@pytest.mark.parametrize("method", METHODS)
def test_2_0_any_split_is_the_same_gradient(tmp_path, method, precision, tolerance):
    """16 ragged completions in micro-batches of 16, 4 and 1; rows 4 to 7 count for nothing."""
    found = {}
    for micro in (16, 4, 1):
        engine = play(METHODS[method](), tmp_path, precision=precision, micro=micro)
        (batch, *_) = _expanded(engine, ragged_prompts(16 // engine.objective.samples))
        labels = batch.labels_BT.copy()
        labels[4:8] = batch.ignore
        engine.gradients(replace(batch, labels_BT=labels))
        found[micro] = torch.cat([p.grad.flatten() for p in engine.trained.values() if p.grad is not None])
        assert found[micro].isfinite().all()
    for micro in (4, 1):
        assert (found[micro] - found[16]).norm() <= tolerance * found[16].norm()


@pytest.mark.parametrize("method", METHODS)
def test_2_0_rows_that_all_count_for_nothing_give_no_gradient_and_no_nan(tmp_path, method):
    engine = play(METHODS[method](), tmp_path)
    (batch, *_) = _expanded(engine, ragged_prompts(4))
    engine.gradients(replace(batch, labels_BT=np.full_like(batch.labels_BT, batch.ignore)))
    assert all((p.grad == 0).all() for p in engine.trained.values() if p.grad is not None)


def test_2_3_updates_are_epochs_of_minibatches(tmp_path):
    """Each completion once an epoch, in another order each epoch and step; advantages are of the whole step."""
    engine = play(ppo(max_new=6, epochs=3, minibatches=4), tmp_path)
    whole = _expanded(play(ppo(max_new=6, epochs=1), tmp_path), ragged_prompts())[0]
    updates = _expanded(engine, ragged_prompts())
    assert [len(b) for b in updates] == [4] * 12
    orders = [np.concatenate([b.row_B for b in updates[e : e + 4]]).tolist() for e in (0, 4, 8)]
    assert [sorted(order) for order in orders] == [list(range(16))] * 3
    assert all(a != b for a, b in pairwise(orders))
    for batch in updates:
        torch.testing.assert_close(batch.columns["advantages_BT"], whole.columns["advantages_BT"][batch.row_B])
    assert [("sampled_logps_BT" in b.columns) for b in updates] == [True] + [False] * 11
    again = _expanded(engine, ragged_prompts())
    assert [b.row_B.tolist() for b in again] == [b.row_B.tolist() for b in updates]
    assert [b.row_B.tolist() for b in _expanded(engine, ragged_prompts(), step=2)] != [b.row_B.tolist() for b in again]
    with pytest.raises(UserError, match=r"objective.minibatches: found 4 for the 3 completions"):
        _expanded(engine, ragged_prompts(3))


def test_2_4_one_update_needs_no_second_forward(tmp_path):
    """On-policy, the log-probabilities of the update itself are the old ones: the same gradient as with them."""
    engine = play(grpo(max_new=6, group=4), tmp_path, precision="fp64")
    (batch,) = _expanded(engine, ragged_prompts())
    assert "old_logps_BT" not in batch.columns
    two = play(grpo(max_new=6, group=4, epochs=2), tmp_path, precision="fp64")
    with_old = _expanded(two, ragged_prompts())[0]
    gradients = []
    for b in (batch, with_old):
        engine.gradients(b)
        gradients.append(torch.cat([p.grad.flatten() for p in engine.trained.values()]))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    assert gradients[0].norm() > 0
    assert abs(float(engine.gradients(batch)[0])) < 0.05  # the loss says nothing


# -- the parts of a loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["k1-reward", "k2-loss"])
def test_2_3_the_loss_of_ppo_is_the_sum_of_its_parts(tmp_path, kl):
    """Policy, value by its weight, entropy taken off, KL by beta: its gradient, written down from the logits."""
    objective = ppo(max_new=6, beta=0.2, kl=kl, entropy=0.3, value_weight=0.7, temperature=0.8)
    engine = play(objective, tmp_path, precision="fp64", reference=policy(5, torch.float64))
    (batch, *_) = _expanded(engine, ragged_prompts())
    with torch.no_grad():
        for n, p in engine.trained.items():  # ratios and values on both sides of what is clipped
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)), dtype=p.dtype))
    rows = batch.to("cpu")
    out, c, mask = engine.model(rows.ids_BT), rows.columns, rows.labels_BT != batch.ignore
    logp_BTV = (out.logits / 0.8).log_softmax(-1)
    logp = logp_BTV.gather(-1, rows.labels_BT.clamp(min=0)[..., None])[..., 0]
    ratio, a = (logp - c["old_logps_BT"]).exp(), c["advantages_BT"]
    parts = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    v, old, returns = engine.modules["value"](out.hidden), c["old_values_BT"], c["returns_BT"]
    near = old + (v - old).clamp(-0.2, 0.2)
    parts = parts + 0.7 * 0.5 * torch.maximum((v - returns) ** 2, (near - returns) ** 2)
    parts = parts + 0.3 * (logp_BTV.exp() * logp_BTV).sum(-1)
    if kl == "k2-loss":
        parts = parts + 0.2 * 0.5 * (logp - c["reference_logps_BT"]) ** 2
    expected = parts[mask].mean()
    assert 0 < float(((ratio < 0.8) | (ratio > 1.2))[mask].double().mean()) < 1
    gradients = torch.autograd.grad(expected, list(engine.trained.values()))
    loss, _, _ = engine.gradients(batch)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-10)
    for (name, p), g in zip(engine.trained.items(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_2_4_a_kl_in_the_reward_counts_from_each_token_on(tmp_path, method):
    """A_t is the score above the baseline less beta times the sum of k1 from t to the end (lambda 1, values 0)."""
    more = {"lam": 1.0, "whiten": False} if method == "ppo" else {"group": 4}
    objective = {"ppo": ppo, "grpo": grpo}[method](max_new=6, beta=0.3, **more)
    engine = play(objective, tmp_path, precision="fp64", reference=policy(5, torch.float64))
    raw = ragged_prompts(4)
    (batch, *_) = _expanded(engine, raw)
    c, mask = batch.columns, batch.labels_BT != batch.ignore
    k1_BT = c["old_logps_BT"] - c["reference_logps_BT"]
    scores = count_a(roll_out(raw, engine.context(1), samples=objective.samples, max_new=6, temperature=1.0), None)
    if method == "grpo":
        scores = (scores.view(-1, 4) - scores.view(-1, 4).mean(1, keepdim=True)).view(-1)
    assert k1_BT.abs().max() > 0.1
    for row, score in enumerate(scores.tolist()):
        places = np.flatnonzero(mask[row])
        for place in places:
            expected = score - 0.3 * float(k1_BT[row, place : places[-1] + 1].sum())
            assert float(c["advantages_BT"][row, place]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("target", "up"), [(1e-3, True), (1e3, False)])
def test_2_3_beta_follows_the_kl_from_the_reference(tmp_path, target, up):
    """Up where the policy is too far away, down where it might go farther, by a fifth of rows / horizon at most."""
    objective = ppo(max_new=6, kl_target=target, kl_horizon=32)
    engine = play(objective, tmp_path, reference=policy(5))
    metrics = engine.step(ragged_prompts()).others
    assert metrics["beta"] == 0.05
    assert float(metrics["kl_nats"]) > 0.1
    assert engine.state["objective"]["beta"] == pytest.approx(0.05 * (1 + (0.2 if up else -0.2) * 16 / 32))


# -- replay ------------------------------------------------------------------------------------------------------------


def _running_text(rows, seed=1):
    draw = np.random.default_rng(seed)
    ids = draw.integers(1, 8, (rows, 13))
    place = np.broadcast_to(np.arange(12), (rows, 12)).copy()
    numbers = np.arange(rows)
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), place, None, np.ones_like(numbers), numbers, replayed=True)


@pytest.mark.parametrize("method", METHODS)
def test_2_7_a_replayed_target_weighs_as_much_as_a_sampled_one(tmp_path, method):
    """Whatever the aggregation of the objective's own loss: its gradient, and nll / (targets of both) beside it."""
    engine = play(METHODS[method](), tmp_path, precision="fp64")
    engine.replay = Replay()
    (own, *_) = _expanded(engine, ragged_prompts(4))
    text = _running_text(3)
    total = own.counts()["token"] + text.counts()["token"]
    out = engine.model(torch.from_numpy(text.ids_BT))
    nll = -token_logps(out.hidden, out.head, torch.from_numpy(text.labels_BT)).sum()
    names = [n for n, p in engine.trained.items() if not n.startswith("extra.")]
    expected = torch.autograd.grad(nll / total, [engine.trained[n] for n in names])
    loss = engine.gradients(own)[0]
    alone = {n: engine.trained[n].grad.clone() for n in names}
    again, _, others = engine.gradients(replace(own, replay=text))
    for name, more in zip(names, expected, strict=True):
        torch.testing.assert_close(engine.trained[name].grad, alone[name] + more, rtol=1e-10, atol=1e-14)
    assert float(again) == pytest.approx(float(loss), rel=1e-12, abs=1e-15)  # no part of the reported loss
    assert float(others["replay_nats"]) == pytest.approx(nll.item() / text.counts()["token"])


@pytest.mark.parametrize("replayed", [5, 2])
def test_2_7_replayed_rows_are_split_over_the_updates_of_a_pass(tmp_path, monkeypatch, replayed):
    """Each once an epoch, as each completion is; otherwise more minibatches would mean a larger fraction."""
    engine, seen = play(ppo(max_new=6, epochs=2, minibatches=3), tmp_path), []
    engine.replay, gradients = Replay(), engine.gradients
    monkeypatch.setattr(engine, "gradients", lambda batch, *more: (seen.append(batch), gradients(batch, *more))[1])
    text = _running_text(replayed)
    metrics = engine.step(replace(ragged_prompts(9), replay=text))
    rows = [batch.replay.row_B.tolist() if batch.replay else [] for batch in seen]
    assert [len(update) for update in rows] == ([2, 2, 1] * 2 if replayed == 5 else [1, 1, 0] * 2)
    assert [row for update in rows for row in update] == 2 * list(range(replayed))
    fraction = 2 * 12 * replayed / (2 * 12 * replayed + metrics.tokens)
    assert metrics.others["replay_fraction"] == pytest.approx(fraction)
    assert metrics.tokens == sum(b.counts()["token"] for b in seen)


# -- scores ------------------------------------------------------------------------------------------------------------


def _some(what):
    """`count_a`, but every third completion gets `what`."""

    def scorer(rollout, ctx):
        scores = count_a(rollout, ctx)
        scores[::3] = what
        return scores

    return scorer


def test_2_4_what_cannot_be_scored_moves_nothing(tmp_path):
    """Such rows lose their labels, and of grpo no baseline has them."""
    engine = play(ppo(max_new=6, beta=0.0), tmp_path, scorer=_some(math.nan))
    (batch, *_) = _expanded(engine, ragged_prompts())
    assert (batch.labels_BT[::3] == batch.ignore).all()
    assert (batch.labels_BT[1::3] != batch.ignore).any(1).all()
    assert batch.columns["advantages_BT"].isfinite().all()
    engine = play(grpo(max_new=6, group=4), tmp_path, scorer=_some(math.nan))
    rollout = roll_out(ragged_prompts(6), engine.context(1), samples=4, max_new=6, temperature=1.0)
    (batch,) = _expanded(engine, ragged_prompts(6))
    found = batch.columns["advantages_BT"]
    assert (found[::3] == 0).all()
    scores, known = count_a(rollout, None)[:4], torch.tensor([False, True, True, False])
    expected = torch.where(known, scores - scores[known].mean(), 0.0)
    assert expected.any()
    mask = torch.from_numpy(batch.labels_BT != batch.ignore)
    assert torch.equal(found[:4], torch.where(mask[:4], expected[:, None], 0.0))
    assert engine.step(ragged_prompts(6)).others["unscored_fraction"] == pytest.approx(1 / 3)
    for kl in ("k1-reward", "k3-loss"):
        engine = play(grpo(max_new=6, group=4, beta=0.3, kl=kl), tmp_path, scorer=_some(math.nan))
        (batch,) = _expanded(engine, ragged_prompts(6))
        assert (batch.labels_BT[::3] == batch.ignore).all()
        assert (batch.columns["advantages_BT"][::3] == 0).all()


def test_a_mean_reward_is_of_what_could_be_scored(tmp_path):
    """Batches count by their scored completions; where nothing is scored there is no reward, and none is the best."""

    def scorer(rollout, ctx):
        scores = count_a(rollout, ctx)
        scores[1 if len(scores) == 4 else 3 :] = math.nan
        return scores

    batches = [ragged_prompts(4), ragged_prompts(6, seed=1)]
    engine = play(grpo(max_new=6, group=4), tmp_path, scorer=scorer)
    drawn = [roll_out(b, engine.context(0), samples=1, max_new=6, temperature=1.0) for b in batches]
    known = torch.cat([scorer(rollout, None) for rollout in drawn])
    known = known[~known.isnan()]
    assert len(known) == 4
    numbers = engine.evaluate(batches)[2]
    assert numbers["reward"] == pytest.approx(float(known.mean()))
    assert numbers["unscored_fraction"] == pytest.approx(0.6)
    nothing = play(grpo(max_new=6, group=4), tmp_path, scorer=lambda rollout, _: count_a(rollout, None) * math.nan)
    assert "reward" not in nothing.evaluate(batches)[2]
    assert "reward" not in nothing.step(ragged_prompts(6)).others
    update_best(nothing, {"val_loss": 0.0}, EventLog(tmp_path / "metrics.jsonl"))
    assert nothing.state["best_val"] is None


def test_2_3_eos_rule_a_constant_where_no_stop_token_came(tmp_path):
    objective = grpo(max_new=4, group=4, no_stop_reward=-1.0)
    engine = play(objective, tmp_path)
    raw = ragged_prompts()
    rollout = roll_out(raw, engine.context(1), samples=4, max_new=4, temperature=1.0)
    seen = {}

    def training_batch(rollout, scores, ctx):
        seen["scores"] = scores
        return rollout.batch

    objective.training_batch = training_batch
    next(iter(engine._expand(raw, engine.context(1))))
    cut = torch.from_numpy(rollout.truncated_B)
    assert 0 < cut.sum() < 64
    assert (seen["scores"][cut] == -1).all()
    assert torch.equal(seen["scores"][~cut], count_a(rollout, None)[~cut])
    context = engine.context(1)
    next(iter(engine._expand(raw, context)))
    assert context.metrics["reward"].value == pytest.approx(float(seen["scores"].mean()))  # as it is learned from


def test_2_3_truncated_completions_are_ended_unfinished_or_left_out(tmp_path):
    columns, cut, masks = {}, None, {}
    for how in ("terminal", "bootstrap", "mask"):
        objective = ppo(max_new=4, beta=0.0, whiten=False, lam=1.0, truncated=how)
        engine = play(objective, tmp_path, precision="fp64")
        with torch.no_grad():
            engine.modules["value"].weight.normal_(generator=torch.Generator().manual_seed(0))
        raw = ragged_prompts()
        rollout = roll_out(raw, engine.context(1), samples=1, max_new=4, temperature=1.0)
        cut, scores = torch.from_numpy(rollout.truncated_B), count_a(rollout, None).double()
        (batch, *_) = _expanded(engine, raw)
        columns[how], masks[how] = batch.columns, torch.from_numpy(batch.labels_BT != batch.ignore)
        with torch.no_grad():
            rows = rollout.batch.to("cpu")
            values = engine.modules["value"](engine.model(rows.ids_BT).hidden)
        after = values[torch.arange(16), rows.columns["lengths_B"] - 1]
    mask = masks["terminal"]
    expected = torch.where(mask, scores[:, None], 0.0)
    torch.testing.assert_close(torch.where(mask, columns["terminal"]["returns_BT"], 0.0), expected)
    unfinished = torch.where(cut, after, scores)
    torch.testing.assert_close(
        torch.where(mask, columns["bootstrap"]["returns_BT"], 0.0), torch.where(mask, unfinished[:, None], 0.0)
    )
    assert not masks["mask"][cut].any()
    assert torch.equal(masks["mask"][~cut], mask[~cut])


def test_2_4_truncated_completions_left_out_of_the_loss_stay_in_the_baseline(tmp_path):
    engine = play(grpo(max_new=4, group=4, truncated="mask"), tmp_path)
    (batch,) = _expanded(engine, ragged_prompts())
    (whole,) = _expanded(play(grpo(max_new=4, group=4), tmp_path), ragged_prompts())
    kept = (batch.labels_BT != batch.ignore).any(1)
    assert 0 < kept.sum() < 64
    torch.testing.assert_close(batch.columns["advantages_BT"][kept], whole.columns["advantages_BT"][kept])


def test_2_3_the_value_is_read_before_the_token_is_chosen(tmp_path):
    """Another y_t changes nothing up to and with V_t, and V_{t+1} at the earliest."""
    objective = ppo(max_new=6)
    engine = play(objective, tmp_path)
    with torch.no_grad():
        engine.modules["value"].weight.normal_()
    (batch, *_) = _expanded(engine, ragged_prompts(1))
    rows = batch.to("cpu")
    t = int((batch.labels_BT[0] != batch.ignore).argmax()) + 1  # the second token of the completion
    other = rows.ids_BT.clone()
    other[0, t + 1] = (other[0, t + 1] + 1) % 8
    with torch.no_grad():
        a, b = (engine.modules["value"](engine.model(ids).hidden)[0] for ids in (rows.ids_BT, other))
    assert torch.equal(a[: t + 1], b[: t + 1])
    assert (a[t + 1] != b[t + 1]).all()
    assert batch.labels_BT[0, t] == rows.ids_BT[0, t + 1]


def test_a_function_gets_prompts_with_their_fields_and_texts_without_stop_tokens(tmp_path):
    asked = []

    def right(given, completions):
        asked.append((given, completions))
        return [float(c == p["answer"]) for p, c in zip(given, completions, strict=True)]

    scorer = Scorer("check.py:right", "reward")
    scorer._function = right
    engine = play(grpo(max_new=3, group=2), tmp_path, scorer=scorer)
    raw = prompts([[1, 2, STOP], [3]], extra=['{"answer": "a"}', '{"answer": ""}'])
    rollout = roll_out(raw, engine.context(1), samples=2, max_new=3, temperature=1.0)
    scores = scorer(rollout, engine.context(1))
    given, completions = asked[0]
    assert given == [{"answer": "a", "prompt": "ab"}] * 2 + [{"answer": "", "prompt": "c"}] * 2
    letters = Letters()
    assert completions == [letters.decode(c.ids).rstrip(".") for c in rollout.completions]
    assert scores.tolist() == [float(c == p["answer"]) for p, c in zip(given, completions, strict=True)]


def _raises(given, completions):
    return [1 / (len(c) - 2) for c in completions]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_raises, r"raised ZeroDivisionError: .* at prompt 'two' with completion 'bb'; fix it"),
        (lambda p, c: [1.0, math.nan, 0.0], r"returned nan at prompt 'two' with completion 'bb', expected a finite"),
        (lambda p, c: [1.0, 0.0, 10**400], r"returned 10+ at prompt .*, expected a finite"),
        (lambda p, c: [1.0, 1e39, 0.0], r"returned 1e\+39 at prompt 'two' with completion 'bb', expected a finite"),
        (lambda p, c: [1.0, 0.0, math.inf], r"returned inf at prompt 'three'"),
        (lambda p, c: 0.5, r"returned 0\.5 for 3 completions, expected a list with a score for each"),
        (lambda p, c: [1.0, "good", 0.0], r"returned 'good' at prompt 'two'"),
        (lambda p, c: [1.0], r"returned 1 scores for 3 completions, expected one for each"),
    ],
)
def test_2_4_what_goes_wrong_in_a_reward_is_said_and_never_a_reward_of_0(function, message):
    given = [{"prompt": p} for p in ("one", "two", "three")]
    with pytest.raises(UserError, match=message):
        call_reward_function("check.py:right", function, given, ["a", "bb", "ccc"])


def test_2_4_none_is_no_score():
    assert [
        math.isnan(s) for s in call_reward_function("f", lambda p, c: [None, True], [{"prompt": ""}] * 2, ["", ""])
    ] == [True, False]


def test_rows_of_running_text_are_refused(tmp_path):
    raw = replace(ragged_prompts(), columns={})
    with pytest.raises(UserError, match="expected prompts"):
        play(ppo(), tmp_path).step(raw)


def test_a_gold_reward_is_logged_of_the_same_completions_and_moves_nothing(tmp_path):
    plain, watched = play(ppo(max_new=6), tmp_path), play(ppo(max_new=6, gold="check.py:few"), tmp_path)
    watched.objective.gold._function = lambda given, texts: [-float(t.count("a")) for t in texts]  # pyright: ignore
    for _ in range(2):
        alone, beside = plain.step(ragged_prompts()), watched.step(ragged_prompts())
        assert "gold_reward" not in alone.others
        assert beside.others["gold_reward"] == -beside.others["reward"] != 0
    assert all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))


# -- a run -------------------------------------------------------------------------------------------------------------


def test_2_3_an_evaluation_samples_afresh_the_same_way_and_moves_nothing(tmp_path):
    engine = play(ppo(max_new=6, kl_target=1.0), tmp_path)
    raw = ragged_prompts()
    whole, halves = engine.evaluate([raw])[2], engine.evaluate(list(raw.micro_batches(4)))[2]
    for name in ("reward", "completion_tokens", "truncated_fraction"):
        assert whole[name] == pytest.approx(halves[name])
    assert engine.evaluate([raw])[2] == whole
    assert engine.state["objective"] == {"beta": 0.05}


def _run(engine, path, stop_at=None):
    def batches():
        for step in range(engine.state["step"] + 1, engine.plan.steps + 1):
            yield ragged_prompts(8, seed=step)

    if stop_at:
        score = engine.objective.scorer

        def killed(rollout, ctx):
            if ctx.step == stop_at:
                raise InterruptedError
            return score(rollout, ctx)

        engine.objective.scorer = killed
    held_out = ragged_prompts(8, seed=99)

    def evaluation(step, whole):
        return {"val_reward": engine.evaluate([held_out])[2]["reward"]}

    log = EventLog(path / "metrics.jsonl")
    return train(engine, lambda first: batches(), evaluation, log, lambda m, rate: None)


@pytest.mark.parametrize("method", ["ppo", "grpo as published"])
def test_2_3_killed_in_the_middle_of_a_rollout_a_run_goes_on_to_the_bit(tmp_path, method):
    """Weights, moments, adaptive KL, log and best: as if nothing had happened."""
    more = {"kl_target": 0.5, "kl_horizon": 50, "minibatches": 2} if method == "ppo" else {}
    options = {"steps": 7, "save_every": 2, "log_every": 1, "lr": 3e-2}

    def fresh(name):
        return play(METHODS[method](**more), tmp_path / name, **options)

    straight = fresh("a")
    final = _run(straight, tmp_path / "a")
    with pytest.raises(InterruptedError):
        _run(fresh("b"), tmp_path / "b", stop_at=6)
    again = fresh("b")
    assert again.training_state.resume(print)
    assert again.state["step"] == 4
    assert {**_run(again, tmp_path / "b"), "tok_s": 0} == {**final, "tok_s": 0}
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert {**again.state} == {**straight.state}
    if method == "ppo":
        assert straight.state["objective"]["beta"] != 0.05
    logs = [[stable(e) for e in read_events(tmp_path / n / "metrics.jsonl", "step")] for n in "ab"]
    last = {e["step"]: e for e in logs[1]}
    assert [last[e["step"]] for e in logs[0]] == logs[0]


def test_the_best_weights_are_those_of_the_highest_reward(tmp_path):
    engine = play(grpo(max_new=4, group=4), tmp_path, steps=10)
    rewards = iter([0.1, 0.9, 0.3, 0.3])
    log = EventLog(tmp_path / "metrics.jsonl")
    batches = (ragged_prompts(4, seed=s) for s in range(10))
    train(engine, lambda first: batches, lambda step, whole: {"val_reward": next(rewards)}, log, lambda m, rate: None)
    assert (engine.state["best_step"], engine.state["best_val"]) == (5, 0.9)
    event = read_events(tmp_path / "metrics.jsonl", "step")[0]
    assert {"loss", "reward", "completion_tokens", "sampler_gap"} <= set(event)


def test_2_3_entropy_is_that_of_the_distribution():
    model = policy()
    ids = torch.randint(0, 8, (3, 9))
    labels = torch.where(torch.rand(3, 9) < 0.5, torch.randint(0, 8, (3, 9)), -100)
    out = model(ids)
    logits = out.logits / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy() * (labels != -100)
    for chunk in (8 * 4, 10_000):
        logp, entropy = token_logps_and_entropies(out.hidden, out.head, labels, temperature=0.7, max_logits=chunk)
        torch.testing.assert_close(entropy, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(logp, token_logps(out.hidden, out.head, labels, temperature=0.7))


def test_what_came_before_a_step_that_could_not_sample_is_in_the_log(tmp_path):
    engine = play(grpo(group=4, max_new=8), tmp_path, steps=4, lr=1e38, log_every=1)
    log, rows = EventLog(tmp_path / "metrics.jsonl"), [ragged_prompts(8)] * 4
    with pytest.raises(UserError, match="its weights have diverged"):
        train(engine, lambda first: iter(rows), lambda step, whole: {"val_reward": 0.0}, log, lambda *_: None)
    log.close()
    assert [event["step"] for event in read_events(tmp_path / "metrics.jsonl", "step")] == [1]
