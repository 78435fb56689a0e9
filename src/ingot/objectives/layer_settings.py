"""Settings of distillation from inside the teacher: states of layers, and relations between tokens. No torch.

Layers are counted from the states: layer 0 is the embedding, and layer k the output of the k-th block.
"""

from collections.abc import Mapping

from pydantic import Field, model_validator

from ingot.core.errors import UserError
from ingot.core.settings import Settings

RELATIONS = ("attention", "queries", "keys", "values", "gram")


class _LayerSettings(Settings):
    layers: dict[int, int] | None = None
    """Layer of the student -> layer of the teacher that it learns from, { 1 = 2, 2 = 6 }. Default: each layer k of N
    from layer round(k M / N) of M."""


class FeatureSettings(_LayerSettings):
    """`features = { weight = 1.0 }`: the student's states, projected to the teacher's width, learn its states."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the mean squared distance of normalised states."""


class RelationSettings(_LayerSettings):
    """`relations = { values = 1.0 }`: how the student's tokens relate to each other learns from the teacher's."""

    attention: float = Field(default=0.0, ge=0)
    """Weight of the divergence of attention probabilities; averaged over heads if the numbers of heads differ."""
    queries: float = Field(default=0.0, ge=0)
    """Weight of the divergence of the relations between queries."""
    keys: float = Field(default=0.0, ge=0)
    """Weight of the divergence of the relations between keys."""
    values: float = Field(default=0.0, ge=0)
    """Weight of the divergence of the relations between values."""
    gram: float = Field(default=0.0, ge=0)
    """Weight of the mean squared difference of the cosine similarities between states."""
    heads: int | None = Field(default=None, ge=1)
    """Relation heads of queries, keys and values; default: the student's key heads."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each relation that has one."""
        return {name: weight for name in RELATIONS if (weight := getattr(self, name))}

    @model_validator(mode="after")
    def _any(self) -> "RelationSettings":
        if not self.weights:
            raise ValueError(f"found no weight, expected one of {', '.join(RELATIONS)}; write {{ values = 1.0 }}")
        if self.heads and not (self.queries or self.keys or self.values):
            raise ValueError(
                f"found heads = {self.heads} with {', '.join(self.weights)}, expected it with queries, keys or values, "
                "which are cut into heads; leave it out"
            )
        return self


def layer_map(where: str, layers: Mapping[int, int] | None, student: int, teacher: int, first: int) -> dict[int, int]:
    """Layer of the student -> layer of the teacher that it learns from.

    Args:
        where: the setting, for errors.
        layers: as set; None for the same relative depth.
        student, teacher: number of blocks.
        first: the first layer: 0 with the embedding, 1 without.

    Raises:
        UserError: a layer is not there.
    """
    if layers is None:
        return {k: max(first, (2 * k * teacher + student) // (2 * student)) for k in range(first, student + 1)}
    if not layers:
        raise UserError(f"{where}: found no layer, expected some such as {{ {student} = {teacher} }}; or leave it out")
    for side, depth, asked in (("student", student, layers), ("teacher", teacher, layers.values())):
        for layer in asked:
            if not first <= layer <= depth:
                raise UserError(
                    f"{where}: found layer {layer} of the {side}, expected {first} to {depth}; name another"
                )
    return dict(layers)
