"""Training on several ranks is training on one: gradients, weights, losses and rewards of every objective.

Every mesh trains all objectives in one group of processes. The results of one process are computed before they fork.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.core.artifact import checkpoint_problem
from ingot.data.batches import IGNORE, Batch
from ingot.distributed import checkpoint
from ingot.distributed import mesh as meshes
from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import gathered, local
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import Checkpointing, ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.objectives.lm import LanguageModel
from ingot.objectives.preference import Preference, Unpaired
from ingot.objectives.replay import Replay
from ingot.objectives.reward import Reward
from ingot.objectives.settings import LanguageModelSettings, PreferenceSettings, RewardSettings, UnpairedSettings
from ingot.optim.grad_terms import Anchor
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.stages.models.load import load_weights
from ingot.stages.models.parts import build_on, empty_on, shard_model
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.objective import Objective
from ingot.train.penalties import KLPenalty, Penalties
from ingot.train.settings import LoopSettings
from tests.distributed.ranks import Peak, on_ranks
from tests.objectives.helpers import pairs
from tests.objectives.rl_helpers import Letters, count_a, grpo, policy, ppo, ragged_prompts

V, T, STEPS = 24, 16, 6
FP64 = torch.float64
ADAPTER = AdapterSettings(rank=2, alpha=4)


def _model(seed: int = 1, **settings: Any) -> Transformer:
    shape = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": T, **settings}
    return build(ModelSettings(**shape).resolve(V), seed, dtype=FP64)


def _checkpointed(mode: Checkpointing) -> Transformer:
    model = _model(depth=3)
    model.checkpointing = mode
    return model


def _text(step: int, rows: int = 15) -> Batch:
    """Rows with 0 to T labels, of no full number per rank; the last quarter, a rank of four, has none."""
    draw = np.random.default_rng(step)
    ids, labels = draw.integers(0, V, (2, rows, T))
    keep = draw.random((rows, T)) < draw.random((rows, 1))
    keep[-(rows // 4) - 1 :] = False
    positions = np.broadcast_to(np.arange(T), ids.shape).copy()
    return Batch(ids, np.where(keep, labels, IGNORE), positions, None, np.zeros(rows, np.int64), np.arange(rows))


def _replay(step: int) -> Batch:
    return replace(_text(step, 7), replay=replace(_text(100 + step, 5), replayed=True))


def _pairs(step: int) -> Batch:
    """Seven pairs, each row as long as it needs: ranks have widths of their own."""
    return pairs(7, seed=step)


def _count_a(rollout: Any, ctx: Any) -> torch.Tensor:
    return ctx.once(lambda: count_a(rollout, ctx))


def _on_policy(objective: Any) -> Any:
    objective.scorer = _count_a
    return objective


@dataclass(frozen=True)
class Case:
    objective: Callable[[], Objective]
    batch: Callable[[int], Batch] = _text
    model: Callable[[], Transformer] = _model
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(clip=0.5))
    companions: tuple[str, ...] = ()
    penalties: Callable[[Transformer, Mesh], Penalties] = lambda model, mesh: Penalties()
    adapter: bool = False
    precision: str = "fp64"


def _kl(model: Transformer, mesh: Mesh) -> Penalties:
    return Penalties([KLPenalty("kl", 2.0, _sharded(_model(8).requires_grad_(False).eval(), mesh))])


def _anchored(model: Transformer, mesh: Mesh) -> Penalties:
    """EWC and L2-SP towards another model's weights."""
    center = {n: p.detach() for n, p in _model(8).named_parameters()}
    draw = torch.Generator().manual_seed(1)
    importance = {n: torch.rand(p.shape, generator=draw, dtype=FP64) for n, p in center.items()}
    anchors = [Anchor("ewc", 3.0, center, importance), Anchor("l2sp", 0.5, center)]
    return Penalties([], anchors, lambda: dict(model.named_parameters()))


def _smooth() -> Objective:
    return LanguageModel(LanguageModelSettings(label_smoothing=0.1, z_loss=1e-3))


CASES = {
    "lm": Case(LanguageModel),
    "lm, fp32": Case(LanguageModel, model=lambda: _model().float(), precision="fp32"),
    "gpt2, tied": Case(LanguageModel, model=lambda: _model(family="gpt2", kv_heads=4)),
    "smoothing and z-loss": Case(_smooth),
    "replay": Case(LanguageModel, batch=_replay),
    "ema": Case(LanguageModel, optim=OptimSettings(ema=0.9)),
    "bf16 moments": Case(LanguageModel, optim=OptimSettings(state="bf16", clip=0.5)),
    "muon": Case(LanguageModel, optim=OptimSettings(kind="muon")),
    "sgd": Case(LanguageModel, optim=OptimSettings(kind="sgd", momentum=0.9, lr=0.1)),
    "kl": Case(LanguageModel, penalties=_kl),
    "anchors": Case(LanguageModel, penalties=_anchored, optim=OptimSettings(weight_decay=0.0)),
    "lora": Case(LanguageModel, adapter=True),
    "every block again": Case(LanguageModel, model=lambda: _checkpointed("full")),
    "two blocks again": Case(LanguageModel, model=lambda: _checkpointed(2)),
    "all but products again": Case(LanguageModel, model=lambda: _checkpointed("selective"), adapter=True),
    "reward": Case(lambda: Reward(RewardSettings()), batch=_pairs),
    "dpo": Case(lambda: Preference(PreferenceSettings(sft_weight=0.5)), batch=_pairs, companions=("reference",)),
    "simpo": Case(lambda: Preference(PreferenceSettings(loss="simpo")), batch=_pairs),
    "kto": Case(lambda: Unpaired(UnpairedSettings()), batch=_pairs, companions=("reference",)),
    "ppo": Case(
        lambda: _on_policy(ppo(epochs=2, minibatches=2, entropy=0.01, max_new=6)),
        batch=lambda step: ragged_prompts(7, step),
        model=lambda: policy(dtype=FP64),
        companions=("reference",),
    ),
    "grpo": Case(
        lambda: _on_policy(grpo(group=3, minibatches=2, max_new=6, beta=0.1)),
        batch=lambda step: ragged_prompts(5, step),
        model=lambda: policy(dtype=FP64),
        companions=("reference",),
    ),
}


def _sharded(model: Transformer, mesh: Mesh) -> Transformer:
    shard_model(model, mesh)
    return model


def _engine(case: Case, mesh: Mesh, directory: Path) -> Engine:
    """An engine of which each rank has its part of everything."""
    model = case.model()
    if case.adapter:
        lora.add_adapters(model, ADAPTER, 5)
    companions: dict[str, nn.Module] = {
        role: _sharded(copy.deepcopy(case.model()).eval().requires_grad_(False), mesh) for role in case.companions
    }
    penalties = case.penalties(model, mesh)
    _sharded(model, mesh)
    lr = 3e-3
    plan = Plan(STEPS, 1, Schedule("constant", lr, lr / 10, 0, STEPS), case.optim, LoopSettings(), 5)
    execution = Execution("cpu", case.precision, 1, 2, "test", T)
    others: dict[str, Any] = {"tokenizer": Letters(), "replay": Replay()}
    return Engine(model, case.objective(), plan, execution, mesh, directory, companions, penalties, **others)


def _own(engine: Engine, batch: Batch) -> Batch:
    return batch if engine.objective.needs.whole_step else batch.share(engine.mesh.rank, engine.mesh.size)


def _whole(engine: Engine, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gathered(t.detach(), engine.trained[n]).flatten() for n, t in tensors.items()])


def _results(case: Case, mesh: Mesh, directory: Path, steps: int) -> dict[str, torch.Tensor]:
    """The gradient of the first update, then what some steps make of it, with an evaluation after the third."""
    engine = _engine(case, mesh, directory)
    found: dict[str, torch.Tensor] = {}
    if not engine.objective.needs.whole_step:
        (batch,) = engine._expand(_own(engine, case.batch(0)), engine.context(1))
        loss, _, _ = engine.gradients(batch)
        gradients = {n: p.grad for n, p in engine.weights.local.items() if p.grad is not None}
        found["gradient"], found["first loss"] = _whole(engine, gradients), loss
    numbers = []
    for step in range(steps):
        done = engine.step(_own(engine, case.batch(step)))
        numbers += [float(done.loss), float(done.grad_norm), done.tokens, float(done.others.get("reward", 0.0))]
        if step == 2:
            evaluated = engine.evaluate([case.batch(50)])
            found["evaluation"] = torch.tensor([evaluated.loss, *evaluated.metrics.values()], dtype=FP64)
    found["numbers"] = torch.tensor(numbers, dtype=FP64)
    found["weights"] = _whole(engine, {n: p.detach() for n, p in engine.weights.local.items()})
    moments = {n: engine.training_state.tensors()[n] for n in engine.training_state.tensors() if n.startswith("optim.")}
    found["moments"] = torch.cat(
        [getattr(t, "full_tensor", lambda t=t: t)().flatten().double() for _, t in sorted(moments.items())]
    )
    return found


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


MESHES = {
    "replicate 2": (2, 1, 3),
    "shard 2": (2, 2, 3),
    "shard 2, ZeRO-1": (2, 2, 1),
    "shard 4": (4, 4, 3),
    "replicate 2 x shard 2": (4, 2, 2),
}


@pytest.mark.parametrize(
    "name",
    [
        "replicate 2",
        pytest.param("shard 2", marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.long) for n in MESHES if n not in ("replicate 2", "shard 2")),
    ],
)
def test_D11_every_objective_trains_alike_on_every_mesh(name: str, tmp_path: Path) -> None:
    """Twenty steps on four ranks, six in the fast tests on two."""
    size, parts, zero = MESHES[name]
    steps = STEPS if size == 2 else 20
    torch.set_num_threads(1)
    expected = {case: _results(CASES[case], Mesh(), tmp_path / "one", steps) for case in CASES}

    def rank(number: int) -> None:
        mesh = meshes.current(parts, zero)
        wrong = []
        for case in CASES:
            found = _results(CASES[case], mesh, tmp_path / "many", steps)
            for what, value in found.items():
                limit = 1e-12 if "gradient" in what else 1e-10
                if CASES[case].precision == "fp32":
                    limit = 1e-5 if "gradient" in what else 1e-3
                if (away := _distance(value, expected[case][what])) > limit:
                    wrong.append(f"{name}, {case}, {what}: {away:.2g}")
        assert not wrong, "\n".join(wrong)

    on_ranks(size, rank)


def _run(case: Case, mesh: Mesh, directory: Path, first: int, last: int) -> list[float]:
    """Losses of steps `first` to `last`, resumed from the newest checkpoint and saved at the end, and the last norm."""
    engine = _engine(case, mesh, directory)
    engine.training_state.resume(lambda message: None)
    assert engine.state["step"] == first - 1
    numbers = []
    for step in range(first, last + 1):
        done = engine.step(_own(engine, case.batch(step)))
        numbers += [float(done.loss), float(done.grad_norm)]
    with engine.eval_mode():  # the averages come and go
        pass
    engine.training_state.save()
    return numbers


def _runs_alike(sizes: list[tuple[int, int]], directory: Path) -> None:
    """Six steps on one rank, and two on each mesh (ranks, shards) in turn, each resuming what another one saved."""
    torch.set_num_threads(1)
    case = Case(LanguageModel, optim=OptimSettings(ema=0.9, clip=0.5))
    expected = _run(case, Mesh(), directory / "one", 1, STEPS)
    for number, (size, parts) in enumerate(sizes):
        first = 1 + 2 * number

        def rank(_: int, size: int = size, parts: int = parts, first: int = first) -> None:
            found = _run(case, meshes.current(parts) if size > 1 else Mesh(), directory / "many", first, first + 1)
            np.testing.assert_allclose(found, expected[2 * first - 2 : 2 * first + 2], rtol=1e-10)

        on_ranks(size, rank)
    paths = [directory / name / "checkpoints" / f"{STEPS:08}" for name in ("one", "many")]
    engine = _engine(case, Mesh(), directory)
    loaded = []
    for path in paths:
        assert checkpoint_problem(path) is None
        checkpoint.load(path, engine.training_state.tensors())
        loaded.append({name: t.clone() for name, t in engine.training_state.tensors().items()})
    for name, tensor in loaded[0].items():
        torch.testing.assert_close(loaded[1][name], tensor, rtol=1e-10, atol=1e-13, msg=name)


def test_D4_a_run_goes_on_where_another_number_of_ranks_stopped(tmp_path: Path) -> None:
    _runs_alike([(1, 1), (2, 2), (1, 1)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[(1, 1), (4, 4), (2, 2)], [(4, 4), (2, 1), (4, 2)]])
def test_D4_a_run_goes_on_on_any_mesh(sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    _runs_alike(sizes, tmp_path)


def test_D4_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    """Replicas hold the same tensors: one file, equal to what one process writes; shards fill it together."""
    torch.set_num_threads(1)
    one = _engine(Case(LanguageModel), Mesh(), tmp_path / "one")
    one.training_state.save()
    name = f"checkpoints/{0:08}"

    def rank(_: int) -> None:
        for parts in (1, 2):
            _engine(Case(LanguageModel), meshes.current(parts), tmp_path / str(parts)).training_state.save()

    on_ranks(2, rank)
    files = [{f.name: f.read_bytes() for f in (tmp_path / d / name).iterdir()} for d in ("one", "1")]
    assert files[0] == files[1]
    assert len(list((tmp_path / "2" / name).glob("*.safetensors"))) == 2
    for parts in ("1", "2"):
        assert checkpoint_problem(tmp_path / parts / name) is None
        assert [p.name for p in (tmp_path / parts / "checkpoints").iterdir()] == [f"{0:08}"]


def test_D4_a_model_is_built_and_loaded_in_parts(tmp_path: Path) -> None:
    """The weights of one process, bit for bit; a rank allocates its parts and at most one whole parameter."""
    settings = {"depth": 6, "width": 64, "heads": 4, "tied": True}
    config = ModelSettings(**settings, context=T).resolve(97)
    expected = dict(build(config, 5, dtype=FP64).named_parameters())
    checkpoint.save(tmp_path / "saved", {f"model.{n}": p.detach() for n, p in expected.items()}, {"step": 0}, {})
    whole, largest = sum(p.nbytes for p in expected.values()), max(p.nbytes for p in expected.values())

    def rank(_: int) -> None:
        mesh = meshes.current(2)
        with Peak() as peak:
            built = build_on(mesh, config, 5, "cpu", FP64)
        assert peak.bytes < 0.52 * whole + 2 * largest
        loaded = empty_on(mesh, config, "cpu", FP64)
        load_weights(loaded, tmp_path / "saved")
        for model in (built, loaded):
            for name, parameter in model.named_parameters():
                assert torch.equal(gathered(local(parameter).detach(), parameter), expected[name]), name

    on_ranks(2, rank)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_D11_weights_sent_in_the_format_of_the_products_change_no_result(zero: int, tmp_path: Path) -> None:
    """Half the bytes; norms, embedding and head are sent as stored. Gradients may be added in another order."""
    config = ModelSettings(depth=2, width=16, heads=2, context=T, qk_norm=True).resolve(V)
    torch.set_num_threads(1)

    def rank(_: int) -> None:
        losses, gradients = [], []
        for sent in (torch.float32, torch.bfloat16):
            mesh = replace(meshes.current(2, zero), gathered=sent)
            plan = Plan(3, 1, Schedule("constant", 1e-3, 1e-4, 0, 3), OptimSettings(), LoopSettings(), 5)
            execution = Execution("cpu", "bf16", 1, 2, "test", T)
            engine = Engine(build_on(mesh, config, 1, "cpu"), LanguageModel(), plan, execution, mesh, tmp_path)
            losses.append(float(engine.gradients(_own(engine, _text(0)))[0]))
            gradients.append({n: p.grad for n, p in engine.weights.local.items() if p.grad is not None})
            block: Any = engine.model.get_submodule("layers.0")
            block.unshard()
            assert block.attention.q.weight.dtype == sent
            assert block.attention_norm.weight.dtype == torch.float32
            block.reshard()
        assert losses[0] == losses[1]
        for name, gradient in gradients[0].items():
            assert _distance(gradients[1][name], gradient) < 1e-6, name

    on_ranks(2, rank)
