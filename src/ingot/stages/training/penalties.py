"""Creates the penalties of a train stage from its settings, fisher stages and companions."""

from collections.abc import Mapping

from torch import Tensor, nn

from ingot.model import lora
from ingot.model.transformer import Transformer
from ingot.optim.grad_terms import Anchor, mean_importance, prepare_importance
from ingot.stages.job import Job
from ingot.stages.models.importance import read_fisher
from ingot.stages.training.settings import TrainSettings
from ingot.train.penalties import KLPenalty, Penalties
from ingot.train.penalty_settings import EwcSettings, KlSettings


def build_penalties(
    job: Job, settings: TrainSettings, model: Transformer, companions: Mapping[str, nn.Module]
) -> Penalties:
    """Create all penalties of a stage.

    Args:
        job: the job of the stage.
        settings: its settings.
        model: the initial model, before a checkpoint is loaded into it.
        companions: the frozen models that the settings name, by role.

    Raises:
        UserError: a fisher stage is damaged, or belongs to a model of another shape.
    """
    losses, anchors = [], []
    trained = {name: weight for name, weight in lora.weights(model).items() if weight.requires_grad}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for name, penalty in zip(settings.penalty_names, settings.penalties, strict=True):
        if isinstance(penalty, KlSettings):
            losses.append(KLPenalty(name, penalty.weight, companions[penalty.role]))
        elif isinstance(penalty, EwcSettings):
            fisher, center = read_fisher(job.inputs[f"fisher:{penalty.fisher}"].path, model)
            importance = prepare_importance(fisher, penalty.clip, penalty.floor, penalty.normalise)
            center = {n: t.to(dtypes[n]) for n, t in center.items()}  # rounded like the initial weights
            anchors.append(Anchor(name, penalty.weight, _like(center, trained), _like(importance, trained)))
            job.display.notify(f"{name}: mean importance {mean_importance(importance):.3g}; no weight decay")
        else:
            start = {name: weight.detach().clone() for name, weight in trained.items()}
            anchors.append(Anchor(name, penalty.weight, start))
            job.display.notify(f"{name}: no weight decay")
    return Penalties(losses, anchors, lambda: lora.weights(model))


def _like(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the given weights, on their device and in their dtype."""
    return {name: tensors[name].to(w.device, w.dtype) for name, w in weights.items()}
