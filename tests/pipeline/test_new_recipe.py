"""`ingot init --text`, `--chat`, `--pairs`, `--model`: what it writes is a legal recipe that fits the files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingot.cli.app import app
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.corpus.settings import CorpusSettings
from ingot.corpus.survey import survey
from ingot.pipeline.graph import Graph, load_graph
from ingot.plan.machine import Device
from ingot.stages.training.settings import TrainSettings
from tests.corpus.corpus_helpers import make

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5},
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory: a folder of texts, a CSV with a column `body`, conversations, pairs, a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i in range(60):
        (tmp_path / "notes" / f"{i}.md").write_text(f"# Note {i}\n\nThe cat of house {i} sat on mat {i * i}.\n")
    (tmp_path / "notes" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "table.csv").write_text("id,body\n" + "".join(f"{i},cat {i} sat on the mat\n" for i in range(60)))
    with (tmp_path / "talk.jsonl").open("w") as talk, (tmp_path / "pairs.jsonl").open("w") as pairs:
        for i in range(60):
            print(json.dumps({"instruction": f"Say {i}.", "response": f'"{i}"'}), file=talk)
            print(json.dumps({"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "no"}), file=pairs)
    (tmp_path / "hf").mkdir()
    atomic_json(tmp_path / "hf" / "config.json", CONFIG)
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    atomic_json(tmp_path / "hf" / "tokenizer.json", {"model": {"type": "BPE"}})
    return tmp_path


def _init(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["init", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


def _written(*arguments: str) -> Graph:
    _init(*arguments, "mine.toml")
    return load_graph(Path("mine.toml"), [], Path("runs"))


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ("--text notes", "text bpe text@bpe base card"),
        ("--chat talk.jsonl", "talk bpe talk@bpe chat card"),
        ("--text notes --chat talk.jsonl", "text bpe talk text@bpe base talk@bpe chat card"),
        ("--chat talk.jsonl --pairs pairs.jsonl", "talk bpe pairs talk@bpe chat pairs@bpe dpo card"),
        ("--model hf:hf --text notes", "text start start.tokenizer text@start.tokenizer base card"),
        ("--model hf:hf --chat talk.jsonl", "talk words start talk@words chat card"),
        ("--model hf:hf --pairs pairs.jsonl", "pairs words start pairs@words dpo"),
    ],
)
def test_what_it_writes_is_a_legal_recipe(files: Path, arguments: str, stages: str) -> None:
    """Models without a chat format get one with trained tokens; models from elsewhere are trained by LoRA."""
    graph = _written(*arguments.split())
    assert set(graph.nodes) == set(stages.split())
    assert graph.recipe.run.name == "mine"
    trained = [node.settings for node in graph.nodes.values() if isinstance(node.settings, TrainSettings)]
    assert all(bool(settings.adapter) == ("--model" in arguments) for settings in trained)
    if "words" in stages:
        assert trained[0].adapter
        assert trained[0].adapter.modules_to_save == ("embedding", "head")


def test_comments_name_what_is_there(files: Path) -> None:
    _written("--text", "notes")
    text = (files / "mine.toml").read_text()
    assert "60 .md" in text
    assert "60 documents" in text
    assert "picture.png" in text
    assert "minute" in text.splitlines()[1]
    assert text.count("\n") < 40
    assert 'by = "characters"' in text


def test_the_card_says_what_it_measures_and_that_its_questions_are_the_files(files: Path) -> None:
    """Answers to questions that were trained on show what was learned by heart, and no more."""
    _written("--chat", "talk.jsonl")
    card = (files / "mine.toml").read_text().split("[stage.card]")[1]
    assert "bits per byte" not in card
    assert "loss of the responses" in card
    assert "not in it\nquestions" in card


def test_a_cpu_with_bf16_instructions_trains_longer_in_the_same_time(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.pipeline.new_recipe.measured_flops", lambda: 1e7)  # a slow one: time limits, not epochs
    durations = []
    for device in (Device("CPU", 10**9, half=None), Device("CPU", 10**9, half="bf16")):
        monkeypatch.setattr("ingot.plan.machine.this_machine", lambda device=device: device)
        settings = _written("--text", "notes").nodes["base"].settings
        assert isinstance(settings, TrainSettings)
        durations.append(settings.duration)
        (files / "mine.toml").unlink()
    slow, fast = (float(str(duration).split()[0].rstrip("KM")) for duration in durations)
    assert 2 < fast / slow < 4


def test_the_field_with_the_text_is_found(files: Path) -> None:
    settings = _written("--text", "table.csv").nodes["text"].settings
    assert isinstance(settings, CorpusSettings)
    assert settings.field == "body"


@pytest.mark.parametrize(
    "sizes",
    [[20_000], [30_000, 10_000, 500], [300_000, *[1000] * 30], [2000] * 50, [200 * n * n for n in range(1, 30)]],
    ids=["a book", "three files", "a book and notes", "equal files", "sizes of a square law"],
)
def test_a_tenth_of_the_text_is_held_out_whatever_the_sizes(files: Path, sizes: list[int]) -> None:
    """The recipe that is written, run on folders of few documents; by = "document" fails on most of them."""
    (files / "mine").mkdir()
    for number, size in enumerate(sizes):
        words = " ".join(f"word{number}x{i}" for i in range(size // 6))
        (files / "mine" / f"{number}.txt").write_text(words[:size] + "\n")
    settings = _written("--text", "mine").nodes["text"].settings
    assert isinstance(settings, CorpusSettings)
    result = make(files / "out", "mine", holdout=settings.holdout)
    assert result["val_bytes"] / result["bytes"] == pytest.approx(0.1, rel=0.01)


def test_a_larger_text_gets_a_larger_model(files: Path) -> None:
    """And what is more than a look reads is extrapolated."""
    small = _written("--text", "notes").nodes["base"].settings
    (files / "mine.toml").unlink()
    with (files / "big.jsonl").open("w") as big:
        for i in range(5000):
            print(json.dumps({"text": f"Line {i} of a text. " * 20}), file=big)
    large = _written("--text", "big.jsonl").nodes["base"].settings
    assert isinstance(small, TrainSettings)
    assert isinstance(large, TrainSettings)
    assert small.model
    assert large.model
    assert (large.model.depth or 0) > (small.model.depth or 0)
    sampled = survey(CorpusSettings.model_validate({"sources": ["big.jsonl"]}), most=1)
    assert not sampled.complete
    assert sampled.bytes == pytest.approx(5000 * 20 * 20, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--text nowhere mine.toml", "--text: 'nowhere' does not exist"),
        ("--chat notes mine.toml", "--chat: notes/0.md: is plain text"),
        ("--text talk.jsonl mine.txt", "expected the recipe to write, such as mine.toml"),
        ("--text notes my+own.toml", "because it names the run"),
        ("--pairs pairs.jsonl mine.toml", "--pairs: found no model"),
        ("--model hf:hf mine.toml", "--model: found nothing to train it on"),
        ("--model hf:nowhere --chat talk.jsonl mine.toml", "--model: no directory nowhere"),
        ("--model gpt2 --chat talk.jsonl mine.toml", "expected hf:DIR"),
        ("--chat pairs.jsonl mine.toml", "--chat: pairs.jsonl: line 1: not a row of chat"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(files: Path, arguments: str, sentence: str) -> None:
    before = set(files.iterdir())
    with pytest.raises(UserError) as error:
        _init(*arguments.split())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert set(files.iterdir()) == before


def test_a_recipe_is_never_overwritten(files: Path) -> None:
    (files / "mine.toml").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        _init("--text", "notes", "mine.toml")
    assert (files / "mine.toml").read_text() == "mine"


@pytest.mark.slow
def test_own_text_is_trained_at_once(tmp_path: Path, ingot) -> None:
    """As a user would, with a text of few words, which allows few tokens; the model has learned them."""
    (tmp_path / "notes").mkdir()
    for i in range(50):
        (tmp_path / "notes" / f"{i}.txt").write_text(" ".join(f"word{(i * j) % 37}" for j in range(60)))
    assert ingot("init", "--text", "notes", "mine.toml", cwd=tmp_path).returncode == 0
    run = ingot("run", "mine.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    table = (tmp_path / "runs" / "mine" / "card" / "table.jsonl").read_text().splitlines()
    bits = {row["model"]: row["value"] for row in map(json.loads, table) if row["metric"] == "bits_per_byte"}
    assert bits["base"] < bits["uniform guess"] / 2
