"""Rounds of a recipe, written out when it is read."""

import tomllib
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.core.rounds import unroll
from ingot.stages.kinds import RECIPE_KINDS

RECIPE = """
[repeat]
rounds = 2
stages = ["sample", "pairs", "reward", "policy"]
start = { policy = "chat", reward = "first" }

[stage.chat]
kind = "train"

[stage.sample]
kind = "generate"
model = "policy"
data = "prompts"

[stage.pairs]
kind = "label"
data = "sample"
by = "rule.py:good"

[stage.reward]
kind = "train"
init = "reward"
objective = "reward"
data = { preferences = 1.0, "pairs*" = 0.5 }

[stage.policy]
kind = "train"
init = "policy"
data = { prompts = 1.0 }
objective = { kind = "ppo", reward = "reward", reference = "chat" }

[stage.card]
kind = "evaluate"
models = ["chat", "policy*"]
prompts = ["policy"]
"""


def _unrolled(table: dict[str, Any]) -> dict[str, Any]:
    return unroll(table, RECIPE_KINDS)


def _table(text: str = RECIPE, **repeat: Any) -> dict[str, Any]:
    table = tomllib.loads(text)
    table["repeat"] |= repeat
    return table


def test_a_name_means_this_round_or_the_one_before() -> None:
    stages = _unrolled(_table())["stage"]
    rounds = [f"{name}-{i}" for i in (1, 2) for name in ("sample", "pairs", "reward", "policy")]
    assert list(stages) == ["chat", *rounds, "card"]
    assert [stages[f"sample-{i}"]["model"] for i in (1, 2)] == ["chat", "policy-1"]
    assert [stages[f"pairs-{i}"]["data"] for i in (1, 2)] == ["sample-1", "sample-2"]
    assert [stages[f"reward-{i}"]["init"] for i in (1, 2)] == ["first", "reward-1"]
    assert stages["reward-1"]["data"] == {"preferences": 1.0, "pairs-1": 0.5}
    assert stages["reward-2"]["data"] == {"preferences": 1.0, "pairs-1": 0.25, "pairs-2": 0.25}
    assert stages["policy-2"]["objective"] == {"kind": "ppo", "reward": "reward-2", "reference": "chat"}
    assert stages["card"]["models"] == ["chat", "policy-1", "policy-2"]


def test_two_names_of_one_stage_in_round_1_add_their_shares() -> None:
    table = _table(start={"policy": "chat", "reward": "first", "pairs": "preferences"})
    table["stage"]["reward"]["data"] = {"preferences": 0.25, "pairs*": 0.75}
    stages = _unrolled(table)["stage"]
    assert stages["reward-1"]["data"] == {"preferences": 0.25, "pairs-1": 0.75}, "made before it in the round"
    table["stage"]["sample"]["data"] = {"preferences": 0.25, "pairs*": 0.75}
    stages = _unrolled({**table, "stage": {"preferences": {"kind": "corpus"}, **table["stage"]}})["stage"]
    assert stages["sample-1"]["data"] == {"preferences": 1.0}
    assert stages["sample-2"]["data"] == {"preferences": 0.25, "pairs-1": 0.75}


def test_a_limit_of_all_rounds_is_the_limit_of_each() -> None:
    table = _table()
    table["stage"]["reward"]["max_epochs"] = {"pairs*": 2.0, "preferences": 3.0}
    stages = _unrolled(table)["stage"]
    assert stages["reward-2"]["data"] == {"preferences": 1.0, "pairs-1": 0.25, "pairs-2": 0.25}
    assert stages["reward-2"]["max_epochs"] == {"pairs-1": 2.0, "pairs-2": 2.0, "preferences": 3.0}
    table["stage"]["policy"]["max_epochs"] = {"policy*": 2.0, "chat": 1.5}
    assert _unrolled(table)["stage"]["policy-1"]["max_epochs"] == {"chat": 1.5}


def test_a_setting_that_is_no_stage_keeps_its_word() -> None:
    stages = _unrolled(_table())["stage"]
    assert stages["reward-2"]["objective"] == "reward"
    assert stages["card"]["prompts"] == ["policy"]


def test_every_reward_of_a_policy_is_a_name() -> None:
    table = _table()
    table["stage"]["policy"]["objective"]["gold"] = "reward"
    assert _unrolled(table)["stage"]["policy-2"]["objective"]["gold"] == "reward-2"


def test_more_rounds_leave_the_first_ones_as_they_are() -> None:
    two, three = _unrolled(_table())["stage"], _unrolled(_table(rounds=3))["stage"]
    assert {name: three[name] for name in two if name != "card"} == {n: b for n, b in two.items() if n != "card"}


def test_a_recipe_without_rounds_is_as_it_was() -> None:
    table = tomllib.loads(RECIPE)
    del table["repeat"]
    assert _unrolled(table) == table


@pytest.mark.parametrize(
    ("repeat", "message"),
    [
        ({"rounds": 0}, r"repeat\.rounds: found 0, expected a number from 1 to"),
        ({"rounds": 10**6}, r"repeat\.rounds: found 1000000, expected .* from 1 to 1,000"),
        ({"stages": ["sampel"]}, r"repeat\.stages: no stage 'sampel'; did you mean 'sample'"),
        ({"stages": ["sample", "sample"]}, "expected each name once"),
        ({"start": {"chat": "x"}}, r"repeat\.start: no stage 'chat'"),
        ({"start": {}}, r"stage\.sample: found 'policy' in round 1, which has no earlier round of it"),
        ({"round": 3}, r"repeat\.round: unknown setting; did you mean 'rounds'"),
    ],
)
def test_what_is_wrong_with_the_table(repeat: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _unrolled(_table(**repeat))


def test_a_stage_may_not_have_the_name_of_a_round() -> None:
    with pytest.raises(UserError, match=r"stage\.pairs-2: is the name of a round of 'pairs'"):
        _unrolled(_table(RECIPE + '[stage.pairs-2]\nkind = "label"\n'))


def test_what_people_fill_in_is_a_file_for_each_round() -> None:
    stages = _unrolled(_table(RECIPE.replace("rule.py:good", "better.jsonl")))["stage"]
    assert [stages[f"pairs-{i}"]["by"] for i in (1, 2)] == ["better-1.jsonl", "better-2.jsonl"]
    outside = _unrolled(_table(RECIPE + '[stage.last]\nkind = "label"\nby = "better.jsonl"\n'))["stage"]["last"]
    assert outside["by"] == "better.jsonl", "a stage that is not repeated"
