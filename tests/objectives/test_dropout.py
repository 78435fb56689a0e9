"""Dropout of an adapter is refused with the objectives that turn dropout off."""

import pytest
from pydantic import TypeAdapter, ValidationError

from ingot.objectives.settings import OBJECTIVES, ObjectiveSettings
from ingot.stages.models.load import build_objective
from ingot.stages.training.settings import TrainSettings

MORE = {"distill": {"teacher": "t"}, "gkd": {"teacher": "t"}, "ppo": {"reward": "r"}, "grpo": {"reward": "r"}}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_dropout_of_an_adapter_is_refused_where_it_would_do_nothing(kind: str) -> None:
    objective = {"kind": kind, **MORE.get(kind, {})}
    settings = TypeAdapter(ObjectiveSettings).validate_python(objective)
    applies = build_objective(settings).needs.dropout
    assert settings.has_dropout == applies
    stage = {"init": "base", "data": {"talk": 1.0}, "duration": "4 steps", "batch": 8, "objective": objective}
    assert TrainSettings.model_validate({**stage, "adapter": {"rank": 2}})
    with_dropout = {**stage, "adapter": {"rank": 2, "dropout": 0.1}}
    if applies:
        assert TrainSettings.model_validate(with_dropout)
        return
    with pytest.raises(ValidationError, match=r"found adapter\.dropout = 0\.1 with an objective .*; leave it out"):
        TrainSettings.model_validate(with_dropout)
