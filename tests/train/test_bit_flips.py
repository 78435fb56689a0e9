"""Bits that flip in memory and in checkpoints are noticed, and the run ends as if they had not."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.core.events import EventLog, read_events, stable
from ingot.distributed import checkpoint
from ingot.distributed import mesh as meshes
from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import gathered, local_tensor
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.stages.models.parts import build_on
from ingot.train import bit_flips
from ingot.train.bit_flips import MAX_RELOADS, BitSums
from ingot.train.engine import Engine
from ingot.train.loop import train
from tests.distributed.ranks import on_ranks
from tests.train.test_engine import T, V, _ragged, _run, _text
from tests.train.test_guard import _new, _same

STEPS, SAVE_EVERY = 60, 4


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 96 tokens are checked like large ones."""
    monkeypatch.setattr(bit_flips, "TOKENS_APART", {"cpu": 0})


def flip(tensor: Tensor, draw: random.Random, high: bool = False) -> None:
    """Flip a random bit; `high`: the lowest of a float's exponent or a higher one."""
    memory = local_tensor(tensor.detach()).reshape(-1).view(torch.uint8).numpy()
    byte = draw.randrange(len(memory))
    if high:
        byte |= tensor.element_size() - 1  # little-endian
    memory[byte] ^= 1 << draw.randrange(7 if high else 8)


def disturb(engine: Engine, flips: dict[int, Callable[[Engine], None]], draw: random.Random) -> Engine:
    """Call a function in some steps before their update, once each: before the forward or after the backward pass."""
    flips, gradients = dict(flips), engine.gradients

    def computing(*arguments: Any) -> Any:
        at, early = engine.state["step"] + 1, draw.random() < 0.5
        if at in flips and early:
            flips.pop(at)(engine)
        out = gradients(*arguments)
        if at in flips:
            flips.pop(at)(engine)
        return out

    engine.gradients = computing  # type: ignore[method-assign]
    return engine


def _random_tensor(kind: str, draw: random.Random, high: bool = False) -> Callable[[Engine], None]:
    """Flips a bit of a random weight, average or moment."""

    def flips(engine: Engine) -> None:
        tensors = engine.training_state.tensors()
        names = [name for name in tensors if name.startswith(kind) and not name.endswith(".step")]
        flip(tensors[draw.choice(names)], draw, high)

    return flips


def _memory_flips(draw: random.Random, high: bool = False) -> dict[int, Callable[[Engine], None]]:
    """A flip between any two checkpoints."""
    return {
        saved + draw.randint(1, SAVE_EVERY): _random_tensor(("model.", "optim.")[number % 2], draw, high)
        for number, saved in enumerate(range(SAVE_EVERY, STEPS, SAVE_EVERY))
    }


def _events(path: Path) -> list[str]:
    return sorted(str(stable(e)) for e in read_events(path / "metrics.jsonl") if e["event"] != "rollback")


def test_flipped_bits_in_weights_moments_and_averages_are_noticed_by_the_next_update(
    tmp_path: Path, make_store
) -> None:
    """And the run ends like an undisturbed one, to the bit. The control, whose high bits flip, does not."""
    source, draw, lines = _text(make_store), random.Random(5), []
    options: dict[str, Any] = {"steps": STEPS, "ema": 0.9}
    straight = _new(tmp_path / "straight", **options)
    final = _run(straight, source, tmp_path / "straight")
    flips = _memory_flips(draw)
    engine = disturb(_new(tmp_path / "flips", **options), flips, draw)
    assert _run(engine, source, tmp_path / "flips", notify=lines.append) == final
    _same(engine, straight)
    assert engine.state == straight.state
    assert _events(tmp_path / "flips") == _events(tmp_path / "straight")
    journal = read_events(tmp_path / "flips" / "metrics.jsonl", "rollback")
    assert [e["step"] for e in journal] == sorted(flips)
    assert len(journal) == 14
    assert all(e["to"] == (e["step"] - 1) // SAVE_EVERY * SAVE_EVERY for e in journal)
    assert lines == [f"{e['why']}; back to step {e['to']}" for e in journal]
    assert lines[0].startswith(f"step {min(flips)}: a bit flipped in the memory, in model.")
    assert {e["why"].rpartition("in ")[2].partition(".")[0] for e in journal} == {"model", "optim"}
    best = [tmp_path / run / "checkpoints" / "best" / "model.safetensors" for run in ("straight", "flips")]
    assert best[0].read_bytes() == best[1].read_bytes()

    control = disturb(_new(tmp_path / "off", **options, on=False), _memory_flips(draw, high=True), draw)
    try:
        lost = _run(control, source, tmp_path / "off")
    except UserError as error:
        assert "expected finite numbers" in str(error)  # noqa: PT017
    else:
        assert not lost["val_loss_nats"] < final["val_loss_nats"] + 0.1


def test_a_flipped_bit_in_a_checkpoint_is_noticed_at_the_next_start(tmp_path: Path, make_store) -> None:
    source, draw, path = _text(make_store), random.Random(6), tmp_path / "flips"
    straight = _new(tmp_path / "straight", steps=STEPS)
    final = _run(straight, source, tmp_path / "straight")
    notes: list[str] = []
    for number in range(1, 7):
        engine = _new(path, steps=STEPS)
        engine.training_state.resume(notes.append)
        with pytest.raises(InterruptedError):
            _run(engine, source, path, stop_at=9 * number + draw.randrange(4))
        newest, before = checkpoint.checkpoint_steps(path / "checkpoints")
        file = draw.choice(sorted(checkpoint.checkpoint_path(path / "checkpoints", newest).iterdir()))
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        again = _new(path, steps=STEPS)
        again.training_state.resume(notes.append)
        assert again.state["step"] == before, file
        assert len(notes) == number
        assert notes[-1].startswith("skipped a damaged checkpoint: ")
    end = _new(path, steps=STEPS)
    assert _run(end, source, path) == final
    _same(end, straight)


@pytest.mark.parametrize("moment", ["before saving", "while saving", "evaluation", "final evaluation"])
def test_a_flipped_bit_is_in_no_checkpoint_and_no_result(moment: str, tmp_path: Path, make_store) -> None:
    source, draw = _text(make_store), random.Random(7)
    straight = _new(tmp_path / "a", steps=12)
    final = _run(straight, source, tmp_path / "a")
    engine = _new(tmp_path / "b", steps=12)
    calls = {"save": 0, "evaluate": 0}
    at = {"before saving": ("save", 2), "while saving": ("save", 3)}.get(moment, ("evaluate", 3 + 2 * ("f" in moment)))
    flips = _random_tensor("model.", draw)

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            calls[name] += 1
            if at != (name, calls[name]):
                return function(*arguments)
            if moment == "while saving":
                flips(engine)
            out = function(*arguments)
            if moment != "while saving":
                flips(engine)
            return out

        return wrapped

    engine.evaluate = wrap("evaluate", engine.evaluate)  # type: ignore[method-assign]
    state = engine.training_state
    state.save = wrap("save", state.save)  # type: ignore[method-assign]
    assert _run(engine, source, tmp_path / "b") == final
    _same(engine, straight)
    assert len(read_events(tmp_path / "b" / "metrics.jsonl", "rollback")) == 1
    for name in ("best", *map("{:08}".format, checkpoint.checkpoint_steps(tmp_path / "a" / "checkpoints"))):
        files = [tmp_path / run / "checkpoints" / name / "model.safetensors" for run in "ab"]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def _frozen(path: Path) -> Engine:
    engine = _new(path, "sgd", steps=12)
    engine.named["embedding.weight"].requires_grad_(False)
    teacher = build(ModelSettings(depth=1, width=16, heads=2, context=T).resolve(V), 4).requires_grad_(False)
    others = engine.plan, engine.execution, engine.mesh, path
    return Engine(engine.model, engine.objective, *others, {"reference": engine.model, "teacher": teacher})


@pytest.mark.parametrize("name", ["model.embedding.weight", "teacher.norm.weight"])
def test_a_flipped_bit_in_a_frozen_weight_ends_the_run_before_it_is_saved(
    name: str, tmp_path: Path, make_store
) -> None:
    """The model's own, though the reference has it too, or that of a companion."""
    source, draw = _text(make_store), random.Random(8)
    straight = _frozen(tmp_path / "a")
    final = _run(straight, source, tmp_path / "a")

    def flips(engine: Engine) -> None:
        role, _, own = name.partition(".")
        flip({"model": engine.model, **engine.companions}[role].get_parameter(own), draw)

    engine = disturb(_frozen(tmp_path / "b"), {6: flips}, draw)
    with pytest.raises(
        UserError, match=rf"a bit flipped in the memory, in {name}; frozen .* run the same command again"
    ):
        _run(engine, source, tmp_path / "b")
    assert checkpoint.checkpoint_steps(tmp_path / "b" / "checkpoints") == [4]
    again = _frozen(tmp_path / "b")
    assert _run(again, source, tmp_path / "b") == final
    _same(again, straight)


def test_a_run_that_cannot_go_back_says_what_to_do(tmp_path: Path, make_store) -> None:
    source, draw = _text(make_store), random.Random(9)
    flips = _random_tensor("model.", draw)
    with pytest.raises(UserError, match=r"step 2: .*; there is no checkpoint from before step 2; run the same command"):
        _run(disturb(_new(tmp_path / "a"), {2: flips}, draw), source, tmp_path / "a")
    engine = _new(tmp_path / "b")
    gradients = engine.gradients

    def broken(*arguments: Any) -> Any:
        if engine.state["step"] == 6:
            flips(engine)
        return gradients(*arguments)

    engine.gradients = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match=rf"back to step 4 {MAX_RELOADS} times; test the memory of this machine"):
        _run(engine, source, tmp_path / "b")


def test_small_steps_are_checked_once_in_so_many_tokens(
    tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_flips, "TOKENS_APART", {"cpu": 3 * 8 * T})
    for on, expected in ((True, [2, 5, 8, 11]), (False, [])):
        engine = _new(tmp_path / str(on), steps=12, on=on)
        checked, step = [], engine.step

        def stepping(raw: Any, checked: list[int] = checked, step: Callable[..., Any] = step) -> Any:
            metrics = step(raw)
            checked.extend([metrics.step] if metrics.checks else [])
            return metrics

        engine.step = stepping  # type: ignore[method-assign]
        _run(engine, _text(make_store), tmp_path / str(on))
        assert checked == expected


def test_a_checked_update_is_computed_and_not_replayed(tmp_path: Path, make_store) -> None:
    """So a recorded one needs no check in it."""
    engine = _new(tmp_path, steps=12)
    engine.bit_flips.steps_apart = 3
    replayed: list[int] = []

    def replay(batch: Any, counts: Any, lr: float) -> Any:
        replayed.append(engine.state["step"] + 1)
        return engine._compute_update(batch, counts, lr, 0)

    engine._recorder = replay
    final = _run(engine, _text(make_store), tmp_path)
    assert replayed == [1, 3, 4, 6, 7, 9, 10, 12]
    assert math.isfinite(final["val_loss_nats"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (4, 8), (0, 3)])
def test_every_bit_of_a_tensor_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also of one that is transposed, or begins at an odd place."""
    draw, room = random.Random(10), torch.zeros(100)
    placed = room.to(dtype)[1 : 1 + int(np.prod(shape))].view(shape)
    for tensor in (placed, placed.T if placed.dim() == 2 else placed):
        sums = BitSums(lambda tensor=tensor: {"other": torch.ones(3), "this": tensor})
        sums.record()
        for _ in range(20 if tensor.numel() else 0):
            (check,) = sums.checks()
            assert check.flipped() is None
            flip(placed, draw)
            (check,) = sums.checks()
            assert check.flipped() == "this"
            sums.record()


def _on_rank(mesh: Mesh, path: Path) -> Engine:
    plain = _new(path, steps=12)
    config = ModelSettings(depth=2, width=32, heads=2, context=T).resolve(V)
    model, execution = build_on(mesh, config, 3, "cpu"), replace(plain.execution, threads=1)
    return Engine(model, plain.objective, plain.plan, execution, mesh, path)


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_ranks_go_back_if_a_bit_of_one_flips(shard: int, tmp_path: Path) -> None:
    def rank(number: int) -> None:
        mesh, ends = meshes.current(shard), []
        for name, flips in (("a", {}), ("b", {7: lambda e: flip(e.named["norm.weight"], random.Random(11))})):
            engine = _on_rank(mesh, tmp_path / name)
            if number == 1:
                disturb(engine, flips, random.Random(12))
            batches = lambda first: (_ragged(s).share(mesh.rank, 2) for s in range(first, 13))  # noqa: E731
            log = EventLog(tmp_path / name / f"rank{number}" / "metrics.jsonl")
            train(engine, batches, lambda step, whole: {"val_loss_nats": 1.0}, log, lambda m, rate: None)
            log.close()
            ends.append({n: gathered(local_tensor(t), t) for n, t in engine.training_state.tensors().items()})
        assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0] if not n.startswith("guard."))
        (event,) = read_events(tmp_path / "b" / f"rank{number}" / "metrics.jsonl", "rollback")
        assert (event["step"], event["to"]) == (7, 4)
        assert event["why"] == "step 7: a bit flipped in the memory of rank 1, in model.norm.weight"

    on_ranks(2, rank)
