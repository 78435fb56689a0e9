"""The one loop: a step is the same however it is cut, and a run is the same however it is interrupted."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.core.events import EventLog, read_events, stable
from ingot.data.batches import IGNORE, Batch, Loader, Source, all_rows, make_batch
from ingot.data.packing import BestFit, Concatenated
from ingot.data.sampler import Order
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim import low_memory
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.loop import train
from ingot.train.objective import Term
from ingot.train.settings import LoopSettings
from ingot.train.state import INITIAL

V, T, B = 32, 12, 16
DTYPES = {"fp64": torch.float64}


def _engine(path: Path, precision: str = "fp64", micro: int = B, steps: int = 20, lr: float = 1e-2, **loop) -> Engine:
    config = ModelSettings(depth=2, width=32, heads=2, context=T).resolve(V)
    model = build(config, seed=3, dtype=DTYPES.get(precision, torch.float32))
    plan = Plan(steps, 1, Schedule("cosine", lr, lr / 10, 2, steps), OptimSettings(), LoopSettings(**loop), 5)
    return Engine(model, LanguageModel(), plan, Execution("cpu", precision, 2, micro, "test"), Mesh(), path)


def _ragged(seed: int = 0) -> Batch:
    """Sixteen rows with 0 to T labels each; rows 4 to 7 (one micro-batch of 4, four of 1) have none at all."""
    draw = np.random.default_rng(seed)
    ids, labels = draw.integers(0, V, (2, B, T))
    keep = draw.random((B, T)) < draw.random((B, 1))
    keep[4:8] = False
    labels = np.where(keep, labels, IGNORE)
    positions = np.broadcast_to(np.arange(T), (B, T)).copy()
    return Batch(ids, labels, positions, None, np.zeros(B, np.int64), np.arange(B))


def _gradient(engine: Engine, batch: Batch) -> torch.Tensor:
    engine.gradients(batch)
    return torch.cat([p.grad.flatten().double() for p in engine.trained.values() if p.grad is not None])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_C7_any_split_into_microbatches_is_the_same_gradient(tmp_path: Path, precision: str, tolerance: float) -> None:
    batch = _ragged()
    whole = _gradient(_engine(tmp_path, precision, micro=16), batch)
    for micro in (4, 1):
        split = _gradient(_engine(tmp_path, precision, micro=micro), batch)
        assert (split - whole).norm() <= tolerance * whole.norm()


def test_D4_gradients_are_added_up_in_fp32_under_bf16(tmp_path: Path) -> None:
    """The gradient of 16 micro-batches is the exact sum of those of each. Control: a sum in bf16 is not."""
    batch, engine = _ragged(), _engine(tmp_path, "bf16", micro=1)
    found = _gradient(engine, batch)
    assert {p.grad.dtype for p in engine.trained.values() if p.grad is not None} == {torch.float32}
    counts = batch.counts()
    parts = []
    for row in range(B):
        engine.gradients(batch.take(np.array([row])), counts=counts)
        parts.append(torch.cat([p.grad.flatten() for p in engine.trained.values() if p.grad is not None]))
    exact = torch.stack(parts).double().sum(0)
    assert (found - exact).norm() < 1e-6 * exact.norm()
    rounded = torch.zeros_like(parts[0], dtype=torch.bfloat16)
    for part in parts:
        rounded += part.bfloat16()
    assert (rounded.double() - exact).norm() > 1e-3 * exact.norm()


def test_C7_source_error_averaging_micro_batch_means(tmp_path: Path) -> None:
    """The control of the test above: mean of means differs as soon as token counts do."""
    batch = _ragged()
    engine = _engine(tmp_path)
    whole = _gradient(engine, batch)
    means = torch.stack([_gradient(engine, part) for part in batch.micro_batches(4)]).mean(0)
    assert (means - whole).norm() > 0.05 * whole.norm()


class _Linear(torch.nn.Module):
    """Row b has loss gradient g_b: what accumulation does to gradients, by hand."""

    def __init__(self, gradients: list[list[float]]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.gradients = torch.tensor(gradients, dtype=torch.float64)

    def forward(self, ids_BT, **_):
        return self.gradients[ids_BT[:, 0]] @ self.weight


class _Sum(LanguageModel):
    def loss(self, out, batch, ctx):
        return {"sum": Term(out.sum(), "sequence")}


def test_C7_source_error_two_gradients_by_hand_are_no_plain_sum(tmp_path: Path) -> None:
    """[.1,-.3,.2] and [.3,-.1,.4] make [.2,-.2,.3]; 000's "(sum) is equivalent" is twice that: k times larger."""
    engine = _engine(tmp_path, micro=1)
    model = _Linear([[0.1, -0.3, 0.2], [0.3, -0.1, 0.4]])
    engine = Engine(model, _Sum(), engine.plan, engine.execution, Mesh(), tmp_path)
    ids = np.array([[0], [1]])
    engine.gradients(Batch(ids, ids, ids, None, ids[:, 0], ids[:, 0]))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == pytest.approx([0.2, -0.2, 0.3], abs=1e-15)
    assert model.gradients.sum(0).tolist() == pytest.approx([0.4, -0.4, 0.6])


def test_C5_a_changed_masked_label_changes_nothing(tmp_path: Path) -> None:
    """Ids at masked targets are free to change: loss and gradient are the same to the bit."""
    batch = _ragged()
    engine = _engine(tmp_path, "fp32")
    loss, *_ = engine.gradients(batch)
    before = _gradient(engine, batch)
    ids, labels = batch.ids_BT.copy(), batch.labels_BT.copy()
    last = labels[:, -1] == IGNORE
    assert last.any()
    other = replace(batch, ids_BT=ids, labels_BT=labels)  # the last input of these rows predicts nothing
    ids[last, -1] = (ids[last, -1] + 1) % V
    assert engine.gradients(other)[0] == loss
    after = _gradient(engine, other)
    untouched = engine.named["embedding.weight"].numel()
    assert torch.equal(before[untouched:], after[untouched:])


def test_C5_all_masked_is_zero_and_finite(tmp_path: Path) -> None:
    batch = _ragged()
    nothing = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE))
    engine = _engine(tmp_path)
    loss, counts, _ = engine.gradients(nothing)
    assert loss == 0
    assert counts["token"] == 0
    assert all(p.grad is None or not p.grad.any() for p in engine.trained.values())


def _documents(make_store, lengths: list[int]) -> Source:
    draw = np.random.default_rng(1)
    store = make_store([draw.integers(0, V, n).tolist() for n in lengths], vocab=V)
    return Source("docs", store, BestFit(np.asarray(store.ends), T), isolate=True)


def test_C6_packed_equals_padded(tmp_path: Path, make_store) -> None:
    """The same documents packed into shared rows and alone in padded rows: the same loss and gradient."""
    lengths = [5, 8, 3, 10, 6, 7, 2]
    packed = _documents(make_store, lengths)
    ends = np.asarray(packed.store.ends)
    assert packed.plan.rows < len(lengths)
    engine = _engine(tmp_path)
    (together,) = all_rows(packed, 100)
    loss = engine.gradients(together)[0]
    gradient = _gradient(engine, together)

    class Alone(BestFit):
        def __init__(self):
            super().__init__(ends, T)
            self._first = np.arange(len(lengths) + 1)
            self.rows = len(lengths)

    (apart,) = all_rows(Source("alone", packed.store, Alone(), isolate=True), 100)
    assert len(apart) == len(lengths)
    assert apart.counts()["token"] == together.counts()["token"] == sum(lengths) - len(lengths)
    assert engine.gradients(apart)[0].item() == pytest.approx(loss.item(), rel=1e-12)
    assert (_gradient(engine, apart) - gradient).norm() <= 1e-12 * gradient.norm()
    mixed = replace(together, documents_BT=None)  # control: attention across documents is another loss
    assert abs(engine.gradients(mixed)[0].item() - loss.item()) > 1e-6


def test_C6_a_changed_document_leaves_its_neighbour_bit_identical(tmp_path: Path, make_store) -> None:
    source = _documents(make_store, [6, 6])
    (batch,) = all_rows(source, 1)
    engine = _engine(tmp_path, "fp32")

    def hidden(b: Batch) -> torch.Tensor:
        t = b.to("cpu")
        return engine.model(t.ids_BT, positions_BT=t.positions_BT, documents_BT=t.documents_BT).hidden.detach()

    first, second = batch.documents_BT[0] == 0, batch.documents_BT[0] == 1
    ids = batch.ids_BT.copy()
    ids[0, np.flatnonzero(first)[2]] = (ids[0, 2] + 5) % V
    before, after = hidden(batch), hidden(replace(batch, ids_BT=ids))
    assert torch.equal(before[:, second], after[:, second])
    assert not torch.equal(before[:, first], after[:, first])


def test_D1_learning_at_the_last_position_only_is_slower(tmp_path: Path, make_store) -> None:
    """004: a loss at the last position throws T - 1 of T signals away. Same batches, same steps."""
    draw = np.random.default_rng(0)
    step = draw.permutation(V)
    ids = [0]
    for _ in range(4000):
        ids.append(int(step[ids[-1]]) if draw.random() < 0.9 else int(draw.integers(V)))
    store = make_store([ids], vocab=V)
    source = Source("s", store, Concatenated(np.asarray(store.ends), T), isolate=False)
    order = Order((source.plan.rows,), (1.0,), seed=1)
    losses = {}
    for name in ("all", "last"):
        engine = _engine(tmp_path / name, "fp32", micro=8, steps=40)
        for s in range(1, 41):
            batch = make_batch([source], *order.at(8 * (s - 1), 8))
            if name == "last":
                labels = batch.labels_BT.copy()
                labels[:, :-1] = IGNORE
                batch = replace(batch, labels_BT=labels)
                assert batch.counts()["token"] * T == 8 * T
            engine.step(batch)
        losses[name] = engine.evaluate(all_rows(source, 50))[0]
    assert losses["all"] < losses["last"] - 0.3


# -- whole runs ------------------------------------------------------------------------------------------------------


def _run(
    engine: Engine,
    source: Source,
    path: Path,
    stop_at: int | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> dict[str, float]:
    order = Order((source.plan.rows,), (1.0,), seed=1)
    engine.training_state.resume(lambda text: None)
    loaders: list[Loader] = []

    def until(first: int) -> Iterator[Batch]:
        make = lambda step: make_batch([source], *order.at(8 * (step - 1), 8))  # noqa: E731
        loaders.append(Loader(make, first, engine.plan.steps))
        for number, batch in enumerate(loaders[-1], first):
            if stop_at is not None and number > stop_at:
                raise InterruptedError
            yield batch

    def evaluation(step: int, whole: bool) -> dict[str, float]:
        return {"val_loss_nats": engine.evaluate(all_rows(source, 8, limit=None if whole else 3))[0]}

    log = EventLog(path / "metrics.jsonl")
    try:
        return stable(train(engine, until, evaluation, log, lambda m, rate: None, notify))
    finally:
        for loader in loaders:
            loader.close()
        log.close()


def _text(make_store) -> Source:
    draw = np.random.default_rng(2)
    store = make_store([draw.integers(0, 8, 900).tolist()], vocab=V)
    return Source("s", store, Concatenated(np.asarray(store.ends), T), isolate=False)


def test_D12_resume_is_never_having_stopped_to_the_bit(tmp_path: Path, make_store) -> None:
    source = _text(make_store)
    options = {"precision": "fp32", "micro": 4, "log_every": 1, "save_every": 4}
    straight = _engine(tmp_path / "a", **options)
    final = _run(straight, source, tmp_path / "a")
    for stop in (2, 6, 15):
        with pytest.raises(InterruptedError):
            _run(_engine(tmp_path / "b", **options), source, tmp_path / "b", stop_at=stop)
    again = _engine(tmp_path / "b", **options)
    assert _run(again, source, tmp_path / "b") == final
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl")] for x in "ab"]
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1]))


@pytest.mark.parametrize(
    "optim",
    [
        {"kind": "adam"},
        {"kind": "sgd"},
        {"kind": "muon"},
        {"kind": "lion"},
        {"kind": "adamw", "ema": 0.8},
        {"kind": "adamw", "state": "bf16"},
        {"kind": "adamw", "state": "8bit"},
    ],
    ids=lambda optim: "-".join(map(str, optim.values())),
)
def test_D12_every_optimizer_goes_on_to_the_bit(
    tmp_path: Path, make_store, optim: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its moments are in the checkpoint by name, the average's too; AdamW alone is the test above."""
    source = _text(make_store)
    if optim.get("state") == "8bit":
        pytest.importorskip("torchao")
        monkeypatch.setattr(low_memory, "has_codes", lambda elements: elements % 256 == 0)

    def engine(name: str) -> Engine:
        made = _engine(tmp_path / name, "fp32", micro=8, steps=7, save_every=3)
        plan = replace(made.plan, optim=OptimSettings.model_validate({"lr": 1e-2, **optim}))
        return Engine(made.model, made.objective, plan, made.execution, made.mesh, tmp_path / name)

    straight = engine("a")
    final = _run(straight, source, tmp_path / "a")
    with pytest.raises(InterruptedError):
        _run(engine("b"), source, tmp_path / "b", stop_at=4)
    again = engine("b")
    assert _run(again, source, tmp_path / "b") == final
    moments = {name for name in straight.training_state.tensors() if name.startswith("optim.")}
    assert {n.rpartition(".")[0].removeprefix("optim.") for n in moments} == set(straight.trained)
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_an_averaged_run_trains_the_same_and_hands_on_the_average(tmp_path: Path, make_store) -> None:
    """Averaging moves no step; evaluations and the model of every checkpoint are the average's."""
    source = _text(make_store)

    def trained(name: str, ema: float) -> tuple[Engine, dict[str, float]]:
        made = _engine(tmp_path / name, "fp32", micro=8, steps=9, save_every=3)
        plan = replace(made.plan, optim=OptimSettings(lr=1e-2, ema=ema))
        engine = Engine(made.model, made.objective, plan, made.execution, made.mesh, tmp_path / name)
        return engine, _run(engine, source, tmp_path / name)

    (plain, last), (averaged, found) = trained("plain", 0), trained("averaged", 0.8)
    assert all(torch.equal(p, averaged.named[n]) for n, p in plain.named.items())
    assert found["val_loss_nats"] != last["val_loss_nats"]
    reader = _engine(tmp_path / "reader", "fp32", micro=8)
    for name in ("00000009", "best"):
        checkpoint.load(tmp_path / "averaged" / "checkpoints" / name, reader.training_state.tensors(moments=False))
        assert not torch.equal(reader.named["norm.weight"], averaged.named["norm.weight"])
        if name != "best":
            assert reader.evaluate(all_rows(source, 8))[0] == found["val_loss_nats"]


def test_D12_a_run_goes_on_from_the_last_good_checkpoint(tmp_path: Path, make_store) -> None:
    """The newest checkpoint is damaged: the one before takes over, the damaged one goes, the end is the same."""
    source = _text(make_store)
    options = {"precision": "fp32", "micro": 8, "log_every": 1, "save_every": 4, "keep": 2}
    final = _run(_engine(tmp_path / "a", **options), source, tmp_path / "a")
    with pytest.raises(InterruptedError):
        _run(_engine(tmp_path / "b", **options), source, tmp_path / "b", stop_at=15)
    root = tmp_path / "b" / "checkpoints"
    assert checkpoint.checkpoint_steps(root) == [12, 8]
    (file,) = checkpoint.checkpoint_path(root, 12).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    messages: list[str] = []
    engine = _engine(tmp_path / "b", **options)
    assert engine.training_state.resume(messages.append)
    assert engine.state["step"] == 8
    assert checkpoint.checkpoint_steps(root) == [8]
    assert "00000012" in messages[0]
    assert _run(engine, source, tmp_path / "b") == final


def test_D12_weights_load_without_the_optimizer(tmp_path: Path, make_store) -> None:
    engine = _engine(tmp_path, "fp32")
    engine.step(next(all_rows(_text(make_store), 8)))
    engine.training_state.save()
    other = _engine(tmp_path / "other", "fp32")
    weights = other.training_state.tensors(moments=False)
    assert not any("exp_avg" in n for n in weights)
    state = checkpoint.load(checkpoint.checkpoint_path(tmp_path / "checkpoints", 1), weights)
    assert torch.equal(other.named["norm.weight"], engine.named["norm.weight"])
    assert set(state) == set(INITIAL)


def test_D12_undeclared_state_is_refused(tmp_path: Path, make_store) -> None:
    engine = _engine(tmp_path, "fp32")
    engine.step(next(all_rows(_text(make_store), 8)))
    engine.state["surplus"] = 1
    with pytest.raises(AssertionError, match=r"undeclared state: \{'surplus'\}"):
        engine.training_state.save()


def test_D15_the_logged_loss_is_the_mean_of_the_whole_step(tmp_path: Path) -> None:
    """003 logs the last micro-batch divided by the accumulation steps; here it is the mean over all labelled tokens."""
    batch = _ragged()
    whole = _engine(tmp_path / "a", micro=16).step(batch)
    split = _engine(tmp_path / "b", micro=4).step(batch)
    last = _engine(tmp_path / "c", micro=4).step(list(batch.micro_batches(4))[-1])
    assert float(split.loss) == pytest.approx(float(whole.loss), rel=1e-12)
    assert abs(float(last.loss) - float(whole.loss)) > 1e-3
    assert split.tokens == batch.counts()["token"]


def test_D15_what_a_run_logs(tmp_path: Path, make_store) -> None:
    _run(_engine(tmp_path, "fp32", micro=8, log_every=5), _text(make_store), tmp_path)
    steps = read_events(tmp_path / "metrics.jsonl", "step")
    assert [e["step"] for e in steps] == [1, 5, 10, 15, 20]
    assert {"loss_nats", "grad_norm", "lr", "tokens", "tok_s"} <= set(steps[0])
    assert [e["step"] for e in read_events(tmp_path / "metrics.jsonl", "evaluation")] == [0, 5, 10, 15, 20]
    assert steps[0]["loss_nats"] == pytest.approx(math.log(V), abs=0.05)


def test_D6_a_run_that_breaks_stops_with_the_weights_of_before(tmp_path: Path, make_store) -> None:
    engine = _engine(tmp_path, "fp32", micro=8, save_every=1, log_every=1, steps=40)
    before = {name: tensor.clone() for name, tensor in engine.training_state.tensors().items()}
    engine.named["norm.weight"].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(
        UserError, match=r"step 20: loss .*, gradient norm nan, expected finite numbers, and 20 steps since step 1"
    ):
        _run(engine, _text(make_store), tmp_path)
    assert checkpoint.checkpoint_steps(tmp_path / "checkpoints") == [19, 18]
    assert all(torch.equal(t, before[name]) for name, t in engine.training_state.tensors().items())
