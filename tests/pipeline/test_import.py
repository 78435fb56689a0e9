"""Models from elsewhere: `init = "hf:DIR"`, another run's stage, `ingot import`, `ingot export`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ingot
from ingot import api
from ingot.convert import hf_weights, peft
from ingot.core.errors import UserError
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.pipeline.graph import import_graph, load_graph
from ingot.pipeline.run import job_of, require_files
from ingot.report import reading
from ingot.report.html import panels_model
from ingot.report.plan import plan_rows
from ingot.stages import child
from ingot.stages.models.export import export_hf, export_peft
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_files import export_tokenizer, import_tokenizer
from ingot.tokenizer.settings import SPECIALS, TokenizerSettings

TUNE = """
[run]
name = "tune"

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
holdout = { fraction = 0.2, by = "document" }

[stage.tuned]
kind = "train"
init = "hf:start"
data = { talk = 1.0 }
batch = 4
duration = "3 steps"
precision = "fp32"
evaluate = { every = 2, tokens = 128, sample_tokens = 4 }
loop = { threads = 1 }

[stage.card]
kind = "evaluate"
models = ["hf:start", "tuned"]
data = ["talk"]
sample_tokens = 4
"""


@pytest.fixture
def start(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`start/`: a tiny Qwen3 with a byte-level tokenizer, as a Hugging Face directory; the recipe beside it."""
    monkeypatch.chdir(work)
    tokenizer = ByteBPE([bytes([b]) for b in range(256)], r"\s+|\S+")
    shape = ModelSettings(family="qwen3", depth=2, width=32, heads=2, context=64).resolve(256 + len(SPECIALS))
    model = build(shape, 7)
    export_tokenizer(tokenizer, work / "start")
    hf_weights.write(work / "start", shape, dict(model.named_parameters()), eos=tokenizer.eot)
    (work / "tune.toml").write_text(TUNE)
    return work / "start"


@pytest.mark.slow
def test_a_recipe_starts_from_a_directory_and_judges_it(start: Path) -> None:
    done = ingot.run("tune.toml")
    assert {"hf:start", "hf:start.tokenizer", "talk@hf:start.tokenizer", "tuned", "card"} <= set(done)
    first, *_, last = _evaluations(done["tuned"].directory)
    assert first["step"] == 0
    judged = {r["model"]: r["value"] for r in _table(done["card"].directory) if r["metric"] == "response_loss_nats"}
    assert judged["hf:start"] == pytest.approx(first["val_loss_nats"], abs=0.5)
    assert last["val_loss_nats"] < first["val_loss_nats"]
    assert judged["tuned"] < judged["hf:start"]


@pytest.mark.slow
def test_models_of_two_tokenizers_are_judged_beside_what_each_has_to_beat(start: Path, work: Path) -> None:
    """Bits per byte of models made elsewhere: gzip and xz once, a uniform guess over each vocabulary."""
    words = ByteBPE([*(bytes([b]) for b in range(256)), b"th"], r"\s+|\S+")
    shape = ModelSettings(family="qwen3", depth=1, width=32, heads=2, context=64).resolve(257 + len(SPECIALS))
    export_tokenizer(words, work / "words")
    hf_weights.write(work / "words", shape, dict(build(shape, 8).named_parameters()), eos=words.eot)
    (work / "text.jsonl").write_text("".join(f'{{"text": "the {i} paths that they went there"}}\n' for i in range(40)))
    (work / "judge.toml").write_text(
        """
[run]
name = "judge"

[stage.plain]
kind = "corpus"
sources = ["text.jsonl"]
quality = "none"
holdout = { fraction = 0.3, by = "document" }

[stage.card]
kind = "evaluate"
models = ["hf:start", "hf:words"]
data = ["plain"]
sample_tokens = 2
"""
    )
    card = ingot.run("judge.toml")["card"].directory
    rows = reading.bits_per_byte(card)["plain"]
    guesses = {"uniform guess of hf:start.tokenizer", "uniform guess of hf:words.tokenizer"}
    assert {r["model"] for r in rows if r["reference"]} == {*guesses, "gzip -9", "xz -9"}
    assert {r["model"] for r in rows if not r["reference"]} == {"hf:start", "hf:words"}
    assert len(rows) == 6
    bits = {r["model"]: r["value"] for r in rows}
    assert bits["uniform guess of hf:start.tokenizer"] > 8 > bits["uniform guess of hf:words.tokenizer"]
    assert "<tr><td>hf:words<td" in str(panels_model.evaluate(card))


def test_models_of_equal_tokenizers_read_a_corpus_once(start: Path) -> None:
    shutil.copytree(start, "again")
    Path("tune.toml").write_text(TUNE.replace('models = ["hf:start", "tuned"]', 'models = ["hf:start", "hf:again"]'))
    roles = load_graph(Path("tune.toml"), [], Path("runs")).nodes["card"].inputs
    assert len([role for role in roles if role.startswith("data:")]) == 1
    assert len([role for role in roles if role.startswith("model:")]) == 2


def test_the_python_door_says_what_it_expects(start: Path) -> None:
    with pytest.raises(UserError, match="device: found 'tpu', expected auto, cpu or cuda"):
        ingot.load(ingot.run("tune.toml", only="hf:start")["hf:start"], device="tpu")
    model = ingot.load("runs/tune/hf:start")
    with pytest.raises(UserError, match="messages: found a text, expected a list such as"):
        model.chat("hello")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="prompts: found a text, expected a list of texts"):
        next(model.complete("hello"))


@pytest.mark.slow
def test_import_then_export_is_the_same_to_the_bit(start: Path, ingot: Callable[..., Any], work: Path) -> None:
    brought = ingot("import", "hf:start", "--json", cwd=work)
    assert brought.returncode == 0, brought.stderr
    directory = json.loads(brought.stdout)["directory"]
    assert directory == "runs/imported/start"
    written = ingot("export", directory, "again", "--to", "hf", cwd=work)
    assert written.returncode == 0, written.stderr
    ours, theirs = load_file(work / "again/model.safetensors"), load_file(start / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    text = "the cat sät <|end|>\n"
    assert (import_tokenizer(work / "again").encode(text) == import_tokenizer(start).encode(text)).all()
    assert hf_weights.read_config(work / "again") == hf_weights.read_config(start)
    (answer,) = api.load(work / directory).complete(["the "], max_new=5)
    assert len(answer.completion.ids) <= 5
    with pytest.raises(UserError, match="exists already"):
        export_hf(work / directory, work / "again", "float32", False, print)


@pytest.mark.slow
def test_another_runs_stage_is_a_start(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    short = "stage.base.duration='4 steps'"
    base = ingot.run("tiny.toml", only=["base"], set=[short])["base"]
    text = TUNE.replace("hf:start", "runs/tiny/base").replace("context = 64", "context = 32")
    (work / "tune.toml").write_text(text)
    done = ingot.run("tune.toml", only=["run:base"])
    a, b = ingot.load(base).loaded.model, ingot.load(done["run:base"]).loaded.model
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", ["../up", "", "a@b", "report.html"])
def test_an_import_has_a_name_that_stays_in_its_run(start: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"--name: found '{name}', and .*; choose another with --name"):
        import_graph("hf:start", Path("runs"), name)


def test_the_plan_knows_the_shape_before_the_import_has_run(start: Path) -> None:
    rows = {r["name"]: r for r in plan_rows(load_graph(Path("tune.toml"), [], Path("runs")))}
    assert rows["tuned"]["forecast"]["parameters"]["total"] == hf_weights.read_config(start).parameters


def test_rows_longer_than_the_imported_model_are_refused_unless_its_scaling_reaches_them(start: Path) -> None:
    longer = ["stage.tuned.context=128"]
    with pytest.raises(UserError, match="found 128, expected at most 64, which 'hf:start' was"):
        load_graph(Path("tune.toml"), longer, Path("runs"))
    config = json.loads((start / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    (start / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    assert load_graph(Path("tune.toml"), longer, Path("runs")).nodes["tuned"]


@pytest.mark.slow
def test_what_was_made_from_files_that_are_gone_still_holds(start: Path, ingot: Callable[..., Any]) -> None:
    """The model imported and the conversations: nothing is needed but what is to be made anew."""
    made = ingot("run", "tune.toml", "--json")
    assert made.returncode == 0, made.stderr
    Path("away").mkdir()
    for name in ("start", "talk.jsonl"):
        Path(name).rename(Path("away", name))
    again = ingot("run", "tune.toml", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(made.stdout)
    for command in (["plan"], ["status"], ["verify"], ["report"]):
        assert ingot(*command, "tune.toml").returncode == 0
    rows = json.loads(ingot("plan", "tune.toml", "--json").stdout)
    assert {row["state"] for row in rows} == {"HIT"}
    gone = {row["name"] for row in rows if "its source files are gone" in row["why"]}
    assert {"talk", "hf:start", "hf:start.tokenizer"} <= gone

    changed = ["tune.toml", "--set", "stage.talk.holdout.fraction=0.1"]
    refused = ingot("run", *changed)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: stage.talk: sources: 'talk.jsonl' does not exist")
    assert ingot("run", *changed, "--only", "hf:start").returncode == 0  # which does not need it
    Path("talk.jsonl").write_text(Path("away/talk.jsonl").read_text() + "\n")  # other bytes
    states = {row["name"]: row["state"] for row in json.loads(ingot("plan", "tune.toml", "--json").stdout)}
    assert (states["talk"], states["hf:start"]) == ("RUN", "HIT")


@pytest.mark.slow
def test_another_path_that_is_not_there_is_a_mistake(start: Path, ingot: Callable[..., Any]) -> None:
    """Paths of models and vocabularies are part of no key, only their content is."""
    begin = '\n[stage.begin]\nkind = "import"\npath = "hf:start"\n'
    Path("own.toml").write_text(TUNE.replace('"hf:start"', '"begin"').replace("tune", "own", 1) + begin)
    assert ingot("run", "own.toml", "--only", "begin").returncode == 0
    mistaken = ingot("run", "own.toml", "--only", "begin", "--set", "stage.begin.path='hf:strat'")
    assert mistaken.returncode == 2
    assert mistaken.stderr.startswith("error: stage.begin: path: no directory strat")
    start.rename("away")
    assert ingot("run", "own.toml", "--only", "begin").returncode == 0


def test_a_changed_weight_changes_the_key_of_what_starts_from_it(start: Path) -> None:
    def keys() -> dict[str, str]:
        return {n.name: n.key for n in load_graph(Path("tune.toml"), [], Path("runs")).nodes.values()}

    before = keys()
    tokenizer = ByteBPE([bytes([b]) for b in range(256)], r"\s+|\S+")
    config = hf_weights.read_config(start)
    (start / "config.json").unlink()
    (start / "model.safetensors").unlink()
    hf_weights.write(start, config, dict(build(config, 8).named_parameters()), eos=tokenizer.eot)
    changed = {n for n, key in keys().items() if key != before[n]}
    assert changed == {"hf:start", "tuned", "card"}


def test_weights_that_are_no_numbers_are_refused(start: Path) -> None:
    config, tensors = hf_weights.read_config(start), dict(build(hf_weights.read_config(start), 8).named_parameters())
    tensors["layers.0.ffn.up.weight"].data[3, 5] = torch.nan
    for name in ("config.json", "model.safetensors"):
        (start / name).unlink()
    hf_weights.write(start, config, tensors)
    graph = load_graph(Path("tune.toml"), [], Path("runs"))
    node = graph.nodes["hf:start"]
    vocabulary, jobs = (job_of(graph, n, quiet=True) for n in (node.inputs["tokenizer"], node))
    child.run(vocabulary)
    with pytest.raises(UserError, match=r"found NaN or infinite numbers in layers\.0\.ffn\.up\.weight"):
        child.run(jobs)
    assert not (Path(jobs["dir"]) / "DONE").exists()


@pytest.mark.slow
def test_a_larger_tokenizer_makes_the_embeddings_grow(start: Path) -> None:
    text = TUNE.replace('init = "hf:start"', 'init = "grown"').replace('"hf:start", "tuned"', '"grown"')
    extra = '\n[stage.bpe]\nkind = "tokenizer"\nfrom = "talk"\nvocab = 300\n'
    extra += '\n[stage.grown]\nkind = "import"\npath = "hf:start"\ntokenizer = "bpe"\n'
    Path("tune.toml").write_text(text + extra)
    done = ingot.run("tune.toml", only=["grown"])
    model = ingot.load(done["grown"]).loaded.model
    old = hf_weights.load(start)
    V = old.config.vocab
    assert model.config.vocab == 300
    assert torch.equal(model.embedding.weight[:V], old.embedding.weight)
    mean = old.embedding.weight.double().mean(0).float()
    assert torch.equal(model.embedding.weight[V:], mean.expand(300 - V, -1))

    tuned = ingot.run("tune.toml", set="stage.tuned.adapter={rank=2}", only="tuned")["tuned"].directory
    said: list[str] = []
    export_peft(tuned, Path("adapter"), "float32", False, said.append)
    named = json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named is None, "the directory's own model has fewer ids than the adapter's"
    assert said[0].startswith("the base model of the adapter is grown; `ingot export ")


def test_two_directories_of_one_name_keep_their_own_tokenizers(start: Path) -> None:
    """Their stages have different names; a tokenizer named after the directory would be the first one's for both."""
    for parent, pattern in (("a", r"\s+|\S+"), ("b", r"\S+|\s+")):
        shutil.copytree(start, Path(parent, "start"))
        other = ByteBPE([bytes([b]) for b in range(256)], pattern)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            Path(parent, "start", file).unlink(missing_ok=True)
        export_tokenizer(other, Path(parent, "start"))
    imports = "".join(f'\n[stage.{p}]\nkind = "import"\npath = "hf:{p}/start"\n' for p in "ab")
    Path("tune.toml").write_text(TUNE.replace("hf:start", "b") + imports)
    nodes = load_graph(Path("tune.toml"), [], Path("runs")).nodes
    read = {p: nodes[p].inputs["tokenizer"].settings for p in "ab"}
    assert {p: s.path for p, s in read.items() if isinstance(s, TokenizerSettings)} == {
        "a": Path("a/start"),
        "b": Path("b/start"),
    }


def test_an_adapter_brings_its_embeddings_its_tokenizer_and_its_template(start: Path) -> None:
    """As trainers save them after adding a token; what is beside them is named."""
    model, settings = hf_weights.load(start), AdapterSettings(rank=2, targets=("q",))
    lora.add_adapters(model, settings, 1)
    peft.write(Path("adapter"), model, settings)
    vocab, width = model.config.vocab, model.config.width
    rows = torch.sin(torch.arange((vocab + 1) * float(width))).reshape(vocab + 1, width)
    tensors = load_file("adapter/adapter_model.safetensors")
    tensors = {n: torch.ones_like(t) if "lora_B" in n else t for n, t in tensors.items()}
    names = ("model.embed_tokens", *(() if model.config.tied else ("lm_head",)))
    tensors |= {f"base_model.model.{name}.weight": rows.clone() for name in names}
    save_file(tensors, "adapter/adapter_model.safetensors")
    words = ByteBPE([*(bytes([b]) for b in range(256)), b"th"], r"\s+|\S+")
    export_tokenizer(words, Path("adapter"))
    Path("adapter/training_args.bin").write_bytes(b"x")

    graph = import_graph("hf:start", Path("runs"), "both", "adapter")
    assert not any(node.missing for node in graph.nodes.values())
    jobs = [job_of(graph, node, quiet=False) for node in graph.nodes.values()]
    for job in jobs:
        child.run(job)
    made = api.load(jobs[-1]["dir"], device="cpu").loaded
    assert made.config.vocab == vocab + 1
    assert torch.equal(made.model.embedding.weight, rows)
    assert made.tokenizer.encode("the").tolist() == words.encode("the").tolist()
    assert not torch.equal(made.model.get_parameter("layers.0.attention.q.weight"), _query(start))

    before = {n.name: n.key for n in graph.nodes.values()}
    Path("adapter/chat_template.jinja").write_text("{{ messages[0].content }}")
    after = {n.name: n.key for n in import_graph("hf:start", Path("runs"), "both", "adapter").nodes.values()}
    assert {n for n in before if before[n] != after[n]} == {"both", "both.tokenizer"}


def _query(directory: Path) -> torch.Tensor:
    return hf_weights.load(directory).get_parameter("layers.0.attention.q.weight")


def test_directories_that_hold_no_model_are_refused(start: Path) -> None:
    def problem(init: str) -> str:
        Path("tune.toml").write_text(TUNE.replace("hf:start", init))
        with pytest.raises(UserError) as raised:
            require_files([load_graph(Path("tune.toml"), [], Path("runs"))], [])
        return str(raised.value)

    sentence = problem("hf:nowhere")
    assert "init: path: no directory nowhere, expected a model" in sentence
    assert "\n" not in sentence  # the tokenizer in it is not another problem
    Path("pickled").mkdir()
    Path("pickled/config.json").write_text("{}")
    Path("pickled/pytorch_model.bin").write_bytes(b"x")
    assert "weights as .safetensors" in problem("hf:pickled")
    assert "is not a train stage that is done" in problem("start/../start")
    assert "no stage 'strat'" in problem("strat")


def _evaluations(stage: Path) -> list[dict[str, Any]]:
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == "evaluation"]


def _table(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "table.jsonl").read_text().splitlines()]
