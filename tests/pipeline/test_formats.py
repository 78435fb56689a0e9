"""Pairs and prompts from a file to a store by way of a recipe, what `inspect` shows of them, and who refuses them."""

import csv
import json
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graph
from ingot.report.inspect import inspect
from ingot.report.inspect.mask import mask, print_mask

RECIPE = """
[run]
name = "formats"

[stage.preferences]
kind    = "corpus"
sources = ["pairs.json"]
format  = "pairs"
holdout = { fraction = 0.2 }

[stage.tasks]
kind    = "corpus"
sources = ["tasks.csv"]
format  = "prompts"
fields  = { prompt = "problem" }
holdout = { fraction = 0.2 }

[stage.bpe]
kind  = "tokenizer"
from  = ["preferences", "tasks"]
vocab = 280

[stage.pairs]
kind      = "tokens"
corpus    = "preferences"
tokenizer = "bpe"

[stage.prompts]
kind      = "tokens"
corpus    = "tasks"
tokenizer = "bpe"
"""
TRAIN = """
[stage.base]
kind      = "train"
data      = { NAME = 1.0 }
tokenizer = "bpe"
model     = { depth = 2 }
duration  = "5 steps"
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats")
    (path / "recipe.toml").write_text(RECIPE)
    rows = [{"prompt": f"name {i}", "chosen": f"it is {i}", "rejected": f"who knows {i}"} for i in range(60)]
    (path / "pairs.json").write_text(json.dumps(rows))
    with (path / "tasks.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "answer"), *((f"count to {i}", i) for i in range(60))])
    return path


@pytest.mark.slow
def test_pairs_and_prompts_from_files_to_stores(work, ingot, capsys):
    done = ingot("run", "recipe.toml", "--json", cwd=work)
    assert done.returncode == 0, done.stderr
    runs = work / "runs" / "formats"
    (pairs,) = mask(runs / "pairs", 1)["stores"]
    assert pairs["content"] == "pairs"
    assert [d["side"] for d in pairs["documents"]] == ["chosen", "rejected"]
    pieces = pairs["documents"][1]["pieces"]
    assert "".join(text for text, learned in pieces if not learned).startswith("<|user|>name")
    answer = [text for text, learned in pieces if learned]
    assert ("".join(answer)[:9], answer[-1]) == ("who knows", "<|end|>")
    print_mask(mask(runs / "preferences", 1))
    shown = capsys.readouterr().out
    assert "rejected: " in shown
    assert "tokens compared" in shown
    (prompts,) = mask(runs / "prompts", 2)["stores"]
    assert all(d["trained"] == 0 for d in prompts["documents"])
    print_mask(mask(runs / "prompts", 2))
    shown = capsys.readouterr().out
    assert 'further fields: {"answer": "' in shown
    assert "the model answers" in shown
    stores = inspect.store(runs / "pairs")
    inspect.print_store(stores)
    shown = " ".join(capsys.readouterr().out.split())
    assert (stores["splits"]["train"]["content"], stores["splits"]["train"]["group"]) == ("pairs", 2)
    assert f"{stores['splits']['train']['documents'] // 2} pairs (" in shown
    inspect.print_corpus(inspect.corpus(runs / "preferences"))
    assert "pairs.json: 60 in, 60 kept" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "format"), [("preferences", "pairs"), ("prompts", "prompts")])
def test_the_language_model_refuses_them_before_anything_runs(work, monkeypatch, name, format):
    monkeypatch.chdir(work)
    Path("train.toml").write_text(RECIPE + TRAIN.replace("NAME", name))
    sentence = f"stage.base.data: '{name}' has format = \"{format}\", but objective lm learns from text and chat; name"
    with pytest.raises(UserError, match=sentence):
        load_graph(Path("train.toml"), [], Path("runs"))


def test_likelihood_is_not_measured_on_them(work, monkeypatch):
    monkeypatch.chdir(work)
    text = '[stage.text]\nkind = "corpus"\nsources = ["recipe.toml"]\nholdout = { fraction = 0.2, by = "tail" }\n'
    card = '[stage.card]\nkind = "evaluate"\nmodels = ["base"]\n'
    Path("card.toml").write_text(RECIPE + TRAIN.replace("NAME", "text") + text + card)
    graph = load_graph(Path("card.toml"), [], Path("runs"))
    assert set(graph.nodes["card"].inputs) == {"model:base", "data:text@bpe"}
    with pytest.raises(UserError, match=r"stage.card.data: 'tasks' has format .* likelihood is measured on text and"):
        load_graph(Path("card.toml"), ['stage.card.data=["text", "tasks"]'], Path("runs"))
