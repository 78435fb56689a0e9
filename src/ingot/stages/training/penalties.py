"""The `penalties` of a train stage: settings, fisher stages and companions to what the engine adds to a step."""

from collections.abc import Mapping

from torch import Tensor, nn

from ingot.model import lora
from ingot.model.transformer import Transformer
from ingot.optim.grad_terms import Anchor, mean_of, shaped
from ingot.stages.evaluation.fisher import read_fisher
from ingot.stages.job import Job
from ingot.stages.training.settings import TrainSettings
from ingot.train.penalties import Divergence, Penalties
from ingot.train.penalty_settings import EwcSettings, KlSettings


def penalties_of(
    job: Job, settings: TrainSettings, model: Transformer, companions: Mapping[str, nn.Module]
) -> Penalties:
    """All penalties of a stage.

    Args:
        model: as this stage starts, before any checkpoint is read into it.
        companions: the frozen models that the settings name, by role.

    Raises:
        UserError: a fisher stage is damaged, or of another model.
    """
    losses, anchors = [], []
    trained = {name: weight for name, weight in lora.weights(model).items() if weight.requires_grad}
    kept = {name: p.dtype for name, p in model.named_parameters()}
    for name, penalty in zip(settings.penalty_names, settings.penalties, strict=True):
        if isinstance(penalty, KlSettings):
            losses.append(Divergence(name, penalty.weight, companions[penalty.role]))
        elif isinstance(penalty, EwcSettings):
            fisher, center = read_fisher(job.inputs[f"fisher:{penalty.fisher}"].path, model)
            importance = shaped(fisher, penalty.clip, penalty.floor, penalty.normalise)
            center = {n: t.to(kept[n]) for n, t in center.items()}  # where the start is rounded, so is its anchor
            anchors.append(Anchor(name, penalty.weight, _like(center, trained), _like(importance, trained)))
            job.display.say(f"{name}: mean importance {mean_of(importance):.3g}; weights do not decay")
        else:
            start = {name: weight.detach().clone() for name, weight in trained.items()}
            anchors.append(Anchor(name, penalty.weight, start))
            job.display.say(f"{name}: weights do not decay")
    return Penalties(losses, anchors, lambda: lora.weights(model))


def _like(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of these weights, on their device, in their precision."""
    return {name: tensors[name].to(w.device, w.dtype) for name, w in weights.items()}
