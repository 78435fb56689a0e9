"""The terms of distillation from inside a teacher that runs beside the student: features and relations of layers.

They are penalties beside the loss of `distill`: means over the tokens with a label and over pairs of layers. No
gradient reaches the teacher. `train/relations.py` defines the distances.

Shapes: B rows, T positions, W width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.model.attention import causal_mask, document_mask
from ingot.model.config import ModelConfig
from ingot.objectives.settings import DistillSettings
from ingot.train.objective import Term
from ingot.train.relations import (
    gram_distance,
    normalised,
    relation,
    relation_divergence,
    relation_heads,
    squared_distance,
)

Taps = Mapping[str, Tensor]
_TAPS = {
    "attention": ("query", "key"),
    "queries": ("query",),
    "keys": ("key",),
    "values": ("value",),
    "gram": ("hidden",),
}
"""Relation -> taps of a layer that it reads."""


class LayerTerms:
    """The features and relations between two models of given shapes.

    Raises:
        UserError: a layer is not there, or heads cannot be cut into the relation heads.
    """

    def __init__(self, settings: DistillSettings, student: ModelConfig, teacher: ModelConfig):
        self._student, self._teacher = student, teacher
        self._features, self._relations = settings.layer_maps(student.depth, teacher.depth)
        self._feature_weight = settings.features.weight if settings.features else 0.0
        self._weights = settings.relations.weights if settings.relations else {}
        self._heads = (settings.relations and settings.relations.heads) or student.kv_heads
        self._check_heads()
        windows = [config.window for config in (student, teacher) if config.window]
        self._window = min(windows, default=None)
        self.student_taps = self._taps(self._features.keys(), self._relations.keys())
        self.teacher_taps = self._taps(self._features.values(), self._relations.values())

    def _taps(self, states: Any, related: Any) -> frozenset[str]:
        names = {_tap("hidden", layer) for layer in states}
        return frozenset(names | {_tap(n, layer) for r in self._weights for n in _TAPS[r] for layer in related})

    def _check_heads(self) -> None:
        for name in self._weights.keys() & {"queries", "keys", "values"}:
            for side, config in (("student", self._student), ("teacher", self._teacher)):
                width = (config.heads if name == "queries" else config.kv_heads) * config.head_size
                if width % self._heads:
                    raise UserError(
                        f"objective.relations.heads: found {self._heads}, expected a number that divides the {width} "
                        f"features of the {side}'s {name}; set one that divides those of both models"
                    )

    def modules(self) -> dict[str, nn.Module]:
        """The projection of each layer of the student whose states learn.

        An identity where the widths are equal, because the states of a student that starts with the teacher's layers
        have the same basis; else random and orthogonal.
        """
        projections: dict[str, nn.Module] = {}
        for layer in self._features:
            linear = nn.Linear(self._student.width, self._teacher.width, bias=False)
            same = self._student.width == self._teacher.width
            (nn.init.eye_ if same else nn.init.orthogonal_)(linear.weight)
            projections[f"projection_{layer}"] = linear
        return projections

    def terms(self, student: Taps, teacher: Taps, modules: Mapping[str, nn.Module], batch: Batch) -> dict[str, Term]:
        """The penalties of some rows, computed in the precision of the weights even under autocast."""
        labelled_BT, terms = batch.labels_BT != batch.ignore, {}
        with torch.autocast(batch.ids_BT.device.type, enabled=False):
            if self._features:
                values = [
                    squared_distance(
                        modules[f"projection_{k}"](normalised(student[_tap("hidden", k)][labelled_BT])),
                        teacher[_tap("hidden", m)][labelled_BT],
                    ).sum()
                    for k, m in self._features.items()
                ]
                terms["features"] = _mean(values, self._feature_weight)
            mask_BTT = self._mask(batch) if self._weights else labelled_BT
            for name, weight in self._weights.items():
                sides = (
                    ([student[_tap(n, k)] for n in _TAPS[name]], [teacher[_tap(n, m)] for n in _TAPS[name]])
                    for k, m in self._relations.items()
                )
                values = [(self._distance(name, *pair, mask_BTT, labelled_BT) * labelled_BT).sum() for pair in sides]
                terms[f"relations/{name}"] = _mean(values, weight)
        return terms

    def _distance(
        self, name: str, student: list[Tensor], teacher: list[Tensor], mask_BTT: Tensor, labelled_BT: Tensor
    ) -> Tensor:
        """The distance of a relation for each token, B x T."""
        if name == "gram":
            pairs_BTT = (mask_BTT | mask_BTT.transpose(1, 2)) & labelled_BT[:, None] & labelled_BT[:, :, None]
            return gram_distance(student[0], teacher[0], pairs_BTT)
        if name != "attention":
            student, teacher = ([relation_heads(x_BHTD, self._heads) for x_BHTD in x] for x in (student, teacher))
        return relation_divergence(*(relation(x[0], x[-1], mask_BTT) for x in (student, teacher)))

    def _mask(self, batch: Batch) -> Tensor:
        """True where a query of both models attends to a key: (B or 1) x T x T."""
        if batch.documents_BT is None:
            return causal_mask(batch.context, self._window, batch.ids_BT.device)[None]
        return document_mask(batch.documents_BT, self._window)


def _tap(name: str, layer: int) -> str:
    """The name of a layer's tap: states are numbered from the embedding, blocks from the first one."""
    return f"{name}.{layer if name == 'hidden' else layer - 1}"


def _mean(values: list[Tensor], weight: float) -> Term:
    return Term(torch.stack(values).mean(), "token", weight, penalty=True)
