"""Keys: what changes a result changes the key of that stage and of its readers, and nothing else does."""

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from ingot.core.artifact import digest_json
from ingot.core.errors import UserError
from ingot.core.settings import Execution, Settings, canonical, models_in
from ingot.model.adapter_config import AdapterSettings
from ingot.objectives.settings import OBJECTIVES
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import job_of, link
from ingot.pipeline.status import _changes, _differences, _file_changes
from ingot.stages.kind import Node
from ingot.stages.kinds import RECIPE_KINDS
from ingot.stages.synthesis.settings import EndpointSettings
from ingot.tokenizer.files import has_template


def _graph(work: Path, *overrides: str) -> Graph:
    os.chdir(work)
    return load_graph(Path("tiny.toml"), list(overrides), Path("runs"))


def _keys(work: Path, *overrides: str) -> dict[str, str]:
    return {name: node.key for name, node in _graph(work, *overrides).nodes.items()}


def _changed(work: Path, *overrides: str) -> set[str]:
    before, after = _keys(work), _keys(work, *overrides)
    return {name for name in before if before[name] != after[name]}


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_nodes_come_after_their_inputs(work: Path) -> None:
    graph = _graph(work)
    names = list(graph.nodes)
    assert set(names) == {"clean", "talk", "bpe", "base", "chat", "card", "clean@bpe", "talk@bpe"}
    for node in graph.nodes.values():
        assert all(names.index(i.name) < names.index(node.name) for i in node.inputs.values())


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("stage.bpe.vocab=320", {"bpe", "clean@bpe", "talk@bpe", "base", "chat", "card"}),
        ("stage.base.optim.lr=0.01", {"base", "chat", "card"}),
        ("stage.chat.data.clean=0.2", {"chat", "card"}),
        ("stage.talk.holdout.fraction=0.3", {"talk", "talk@bpe", "chat", "card"}),
        ("stage.card.overlap=0.25", {"card"}),
        ("run.seed=4", {"base", "chat", "card"}),
        ("stage.base.seed=0", {"base", "chat", "card"}),
        ('run.name="other"', set()),
        ("stage.base.loop.micro_batch=2", set()),
        ("stage.base.loop.log_every=7", set()),
        ("stage.base.loop.save_every=7", set()),
        ("stage.clean.workers=1", set()),
        ("stage.base.loop.threads=2", set()),
        ('run.sinks=["tensorboard"]', set()),
    ],
)
def test_a_setting_changes_what_depends_on_it_and_no_more(work: Path, override: str, changed: set[str]) -> None:
    assert _changed(work, override) == changed


def test_long_values_are_shown_from_where_they_differ() -> None:
    before = {"sources": [{"path": "a/rather/long/way/to/the/first/file.txt", "repeat": 1}], "vocab": 3}
    now = {"sources": [{"path": "a/rather/long/way/to/the/first/file.txt", "repeat": 2}], "vocab": 4}
    assert _differences(before, now) == ['sources ...epeat": 1}] -> ...epeat": 2}]', "vocab 3 -> 4"]
    assert _differences({"a": "x" * 90}, {"a": None}) == [f'a "{"x" * 36}... -> null']


def test_a_changed_source_file_changes_what_is_made_of_it(work: Path) -> None:
    before = _keys(work)
    (work / "talk.jsonl").write_text((work / "talk.jsonl").read_text().replace("say", "tell"))
    after = _keys(work)
    assert {n for n in before if before[n] != after[n]} == {"talk", "talk@bpe", "chat", "card"}


TABLES = {"words": "rivals", "where": "quality"}
"""Tables of tables: one entry stands for all."""


def _fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Any:
    """(path, field, under an EXECUTION field?) of every leaf of a settings tree."""
    for name, field in model.model_fields.items():
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        nested = next((t for t in inner if issubclass(t, BaseModel)), None)
        if name == "objective":  # a choice of tables, each with a test of its own below
            nested = None
        if name in ("sources", "phases"):  # a list of tables: the first one stands for all
            nested = None
            yield from _fields(next(models_in(field.annotation)), (*path, name, "0"))
        if name in TABLES and (table := next(models_in(field.annotation), None)):
            nested = None
            yield from _fields(table, (*path, name, TABLES[name]))
        if name == "batch" and (table := next(models_in(field.annotation), None)):  # a number or a table
            yield from _fields(table, (*path, name))
        if nested is not None and not any(isinstance(m, Execution) for m in field.metadata):
            yield from _fields(nested, (*path, name))
        yield (*path, name), field


BASES: dict[str, dict[str, Any]] = {
    "corpus": {"sources": ["a"]},
    "tokenizer": {"from": "clean", "type": "byte-bpe", "vocab": 400},
    "tokens": {"corpus": "a", "tokenizer": "b"},
    "token-files": {"tokenizer": "b", "format": "nanogpt", "train": "a.bin"},
    "train": {"data": {"a": 1.0}, "duration": "5 steps", "tokenizer": "t", "model": {"depth": 2}},
    "evaluate": {"models": ["a"]},
    "import": {"path": "hf:a"},
    "annotate": {"data": ["a"], "teacher": "m"},
    "fisher": {"model": "m", "data": {"a": 1.0}},
    "judge": {"models": ["a"], "against": "b", "data": "talk", "by": ["r"]},
    "generate": {"model": "m", "data": "a"},
    "label": {"data": "s", "by": "rm"},
    "scorer": {"good": ["a"], "bad": ["b"]},
    "score": {"data": "a", "by": ["s"]},
    "select": {"data": "a", "where": {"quality": {"min": 0.2}}},
}
ROPE_SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 64}
CANDIDATES: list[Any] = [
    *(7, 3, 96, 0.3, 0.77, True, False, "x", "2 epochs", "8M", "char", "chat", "best-fit", "code", "none", "linear"),
    *(
        "fp32",
        "bf16",
        "cpu",
        "group",
        "tail",
        "unicode",
        "daft",
        [0.1, 0.2],
        ["q"],
        {"b": 0.5},
        {"depth": 3},
        {"kind": "best-fit"},
        None,
    ),
    *(
        512,
        {"lr": 0.1},
        {"every": 9},
        {"save_every": 9},
        {"shard": 2},
        "p{2}",
        {"fraction": 0.2},
        {"exact": False},
        "longest",
        {"threshold": 0.8},
        "plain",
        {"min_words": 3},
        "[a-z]+|.",
        "0" * 64,
        [{"path": "z"}],
        0.0,
        1,
        2,
        "sha",
    ),
    *("gpt2", "learned", "layer", "gelu", "qkv", ROPE_SCALING),
    *("muon", "cosine"),
    *([{"name": "y", "fraction": 1.0}], -1, "4K tokens"),
    {"chosen": "x"},
    "own.jinja",
    [{"kind": "kl", "reference": "a", "weight": 1.0}],
    "empirical",
    *("rslora", ["q"]),
    *("keep", "chat"),
    *("jsonl", "cp1252", "last answer", "drop"),
    *("2025-01-31", "weak", "megatron"),
    *({"plant": 20}, {"a": 2.0}, {"documents": 3}, {"words": 9}),
    ["embedding", "head"],
    *(["words"], "http://b/v1", {"url": "https://b/v1", "model": "m"}, "prompts"),
    *({"toxicity": {}}, {"other": {"max": 3.0}}, [{"name": "y"}], "ngram", "order"),
    *("stored", "low", "high", "language", {"by": "quality"}),
]
"""Values to try on a field until one is valid and different."""

ONE_VALUE = {
    ("train", "objective"),
    ("generate", "format"),
    ("annotate", "packing", "stride"),  # a token has one stored prediction
    ("train", "phases", "0", "fraction"),  # fractions add up to 1, and here is one phase
}
"""Fields that have one legal value so far."""
RAMP = {"from": 4, "to": 8, "over": "9 steps"}
WITH = {
    ("evaluate", "teacher"): {"models": ["x", "b"]},
    ("tokenizer", "alphabet"): {"from": "clean", "type": "char"},
    ("tokenizer", "path"): {"type": "file", "path": "somewhere"},
    ("tokenizer", "type"): {"from": "clean", "type": "byte-bpe", "vocab": 400},
    **{
        ("tokenizer", name): {"from": "clean", "type": "byte-bpe", "vocab": 400, "template": "own.jinja"}
        for name in ("date", "enable_thinking")
    },
    ("train", "context"): {"data": {"a": 1.0}, "duration": "5 steps", "init": "t"},
    **{("train", name): {"data": {"a": 1.0}, "duration": "5 steps", "init": "t"} for name in ("init", "init_layers")},
    ("train", "model", "size"): {"data": {"a": 1.0}, "duration": "5 steps", "tokenizer": "t", "model": {"size": "4M"}},
    **{
        ("train", "model", "rope_scaling", name): {
            **BASES["train"],
            "model": {"depth": 2, "rope_scaling": ROPE_SCALING},
        }
        for name in ROPE_SCALING
    },
    **{
        ("train", "optim", name): {**BASES["train"], "optim": {"kind": "sgd", "lr": 1.0}}
        for name in ("momentum", "nesterov")
    },
    **{
        ("train", "optim", name): {**BASES["train"], "optim": {"schedule": "wsd"}}
        for name in ("cooldown", "cooldown_shape")
    },
    **{("train", "batch", name): {**BASES["train"], "batch": RAMP} for name in ("start", "to", "over")},
    **{
        ("train", "phases", "0", *path): {**BASES["train"], "phases": [{"name": "x", "fraction": 1.0, **more}]}
        for path, more in (
            *(
                ((name,), {})
                for name in ("name", "fraction", "order", "context", "batch", "schedule", "warmup", "min_ratio")
            ),
            (("lr",), {"schedule": "linear"}),
            *((("batch", name), {"batch": RAMP}) for name in ("start", "to", "over")),
        )
    },
    ("train", "phases", "0", "data"): {
        **BASES["train"],
        "phases": [{"name": "x", "fraction": 0.5}, {"name": "y", "fraction": 0.5}],
    },
    ("train", "phases", "0", "duration"): {
        **{name: value for name, value in BASES["train"].items() if name != "duration"},
        "phases": [{"name": "x", "duration": "5 steps"}],
    },
    **{
        ("corpus", *place, "fields", role): {"sources": [{"path": "a"}], "format": format}
        for place in ((), ("sources", "0"))
        for role, format in {
            "messages": "chat",
            "prompt": "chat",
            "completion": "chat",
            "system": "chat",
            "input": "chat",
            "history": "chat",
            "reasoning": "chat",
            "chosen": "pairs",
            "rejected": "pairs",
        }.items()
    },
    **{
        ("generate", *path): {"data": "a", "endpoint": {"url": "https://a/v1", "model": "m"}}
        for path in (("endpoint",), *(("endpoint", name) for name in EndpointSettings.model_fields))
    },
    **{("generate", name): {"model": "m", "data": "a", "format": "prompts"} for name in ("examples", "new")},
    ("score", "similar_to"): {"data": "a", "measures": ["similarity"]},
    ("fisher", "gamma"): {"model": "m", "data": {"a": 1.0}, "previous": "f"},
    **{
        ("train", *path): {"data": {"a": 1.0}, "duration": "5 steps", "init": "t", "adapter": {"rank": 8}}
        for path in (("adapter",), *(("adapter", name) for name in AdapterSettings.model_fields))
    },
    ("label", "min_score"): {"data": "s", "by": "rm", "format": "chat"},
    ("corpus", "overlap_with"): {"sources": ["a"], "format": "chat"},
    ("corpus", "fields"): {"sources": ["a"], "format": "pairs"},
    **{("corpus", name): {"sources": ["a"], "format": "chat"} for name in ("train_on", "reasoning")},
    ("corpus", "sources", "0", "checksums"): {"sources": [{"path": "s3://bucket/x"}]},
    ("corpus", "sources", "0", "fields"): {"sources": [{"path": "a"}], "format": "pairs"},
    **{
        ("corpus", "words", "rivals", name): {"sources": ["a"], "words": {"rivals": {"path": "rivals.txt"}}}
        for name in ("path", "max_per_thousand", "min_hits", "languages")
    },
    ("scorer", "measure"): {"type": "ngram", "good": ["a"]},
    **{
        ("select", "phases", "0", *path): {"data": "a", "phases": [{"name": "z", "where": {"quality": {"min": 0.2}}}]}
        for path in (
            *(("name",), ("where",)),
            *(("where", "quality", name) for name in ("min", "max", "top", "bottom", "between")),
        )
    },
    ("select", "where", "quality", "per"): {"data": "a", "where": {"quality": {"top": 0.2}}},
    ("select", "phases", "0", "where", "quality", "per"): {
        "data": "a",
        "phases": [{"name": "z", "where": {"quality": {"top": 0.2}}}],
    },
    ("select", "sort", "first"): {"data": "a", "sort": {"by": "quality"}},
    **{
        ("corpus", "dedup", "minhash", name): {"sources": ["a"], "dedup": {"minhash": {"keep": "best", "by": "q"}}}
        for name in ("by", "prefer")
    },
}
"""Fields that need other company to be legal."""


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    if rest and rest[0] == "0":
        first = tree[head][0]
        table = first if isinstance(first, dict) else {"path": first}
        return {**tree, head: [_set(table, tuple(rest[1:]), value), *tree[head][1:]]}
    if not rest:
        out = {**tree, head: value}
        if head == "type" and value == "char":
            out.pop("vocab", None)
        return out
    inner = tree.get(head)
    return {**tree, head: _set(inner if isinstance(inner, dict) else {}, tuple(rest), value)}


def _key(settings: Settings) -> str:
    return digest_json(canonical(settings))


def _cases() -> list[Any]:
    return [
        pytest.param(kind, path, field, id=f"{kind}.{'.'.join(path)}")
        for kind, model in RECIPE_KINDS.items()
        for path, field in _fields(model)
    ]


@pytest.mark.parametrize(("kind", "path", "field"), _cases())
def test_every_semantic_field_changes_the_key_and_no_other_does(kind: str, path: tuple[str, ...], field: Any) -> None:
    model = RECIPE_KINDS[kind]
    base = WITH.get((kind, *path), BASES[kind])
    before = model.model_validate(base)
    name = (*path[:-1], field.alias or path[-1])
    execution = any(isinstance(m, Execution) for m in field.metadata) or path[0] in ("loop", "mesh")
    found = 0
    for value in CANDIDATES:
        try:
            after = model.model_validate(_set(base, name, value))
        except ValidationError:
            continue
        if after == before:
            continue
        found += 1
        if execution:
            assert _key(after) == _key(before)
        else:
            assert _key(after) != _key(before)
    if (kind, *path) not in ONE_VALUE:
        assert found, f"no candidate value is legal for {kind}.{'.'.join(path)}; add one"


OBJECTIVE_CANDIDATES: list[Any] = [
    {"weight": 0.5},
    {"gram": 0.5},
    0.25,
    2.0,
    3,
    True,
    False,
    "x",
    "ipo",
    "reverse",
    "k3-loss",
    "mask",
    "others",
    "sequence",
]
OBJECTIVE_WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("dpo", "gamma"): {"loss": "simpo"},
    **{
        (k, f): {"teacher": "m", "divergence": "jsd"}
        for k in ("distill", "gkd")
        for f in OBJECTIVES[k].settings.model_fields
    },
    **{(k, f): {"reward": "rm", "beta": 0.1} for k in ("ppo", "grpo") for f in OBJECTIVES[k].settings.model_fields},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, f) for k, e in OBJECTIVES.items() for f in e.settings.model_fields if f != "kind"]
)
def test_every_setting_of_an_objective_changes_the_key(kind: str, name: str) -> None:
    model, company = OBJECTIVES[kind].settings, OBJECTIVE_WITH.get((kind, name), {})
    before = model.model_validate({"kind": kind, **company})
    keys = set()
    for value in OBJECTIVE_CANDIDATES:
        with contextlib.suppress(ValidationError):
            keys.add(_key(model.model_validate({"kind": kind, **company, name: value})))
    assert keys - {_key(before)}, f"no candidate value is legal for {kind}.{name}, or none changes the key; add one"


OWN = {
    "a filter": ("clean", "stage.clean.filters=['own.py:f']"),
    "a judge": ("duel", "stage.duel.by=['own.py:f']"),
    "a label": ("labelled", "stage.labelled.by='own.py:f'"),
}
JUDGES = """
[stage.asked]
kind = "corpus"
sources = ["asked.jsonl"]
format = "prompts"

[stage.duel]
kind = "judge"
models = ["chat"]
against = "base"
data = "asked"
by = ["own.py:g"]

[stage.answers]
kind = "generate"
model = "chat"
data = "asked"

[stage.labelled]
kind = "label"
data = "answers"
by = "own.py:g"
"""


@pytest.mark.parametrize("case", OWN)
def test_what_a_function_imports_and_reads_is_in_the_key_and_named(work: Path, case: str) -> None:
    """Of every kind that calls a user's function."""
    name, override = OWN[case]
    (work / "tiny.toml").write_text((work / "tiny.toml").read_text() + JUDGES)
    (work / "asked.jsonl").write_text('{"prompt": "a"}\n' * 4)
    (work / "own.py").write_text("import words\ndef f(*x): return open('banned.json').read()\ndef g(*x): ...\n")
    (work / "words.py").write_text("import more\n")
    for file in ("more.py", "banned.json"):
        (work / file).write_text("1")
    seen = set()
    for file in (None, "own.py", "words.py", "more.py", "banned.json"):
        if file:
            (work / file).write_text((work / file).read_text() + "\n")
        graph = _graph(work, override)
        node = graph.nodes[name]
        seen.add(node.key)
        assert {"own.py", "words.py", "more.py", "banned.json"} <= set(node.files), node.missing
        if file:
            assert _changes(graph.link(node), node) == f"{file} changed"
        _record(graph, node)
    assert len(seen) == 5
    assert _keys(work, override)[name] in seen


def _record(graph: Graph, node: Node) -> None:
    """Record the node as the result that the run links to."""
    graph.link(node).mkdir(parents=True, exist_ok=True)
    record = json.loads(json.dumps(job_of(graph, node, quiet=True)))
    (graph.link(node) / "inputs.json").write_text(json.dumps(record))


def test_a_reason_names_three_changed_files_and_counts_the_others() -> None:
    before = {f"{n}.txt": "a" for n in range(9)}
    now = {f"{n}.txt": "b" if n < 5 else "a" for n in range(8)} | {"new.txt": "a"}
    assert _file_changes(before, now) == ["0.txt changed", "1.txt changed", "2.txt changed", "4 more files changed"]
    assert _file_changes({"a": "1"}, {"b": "1"}) == ["b is new", "a is gone"]
    assert _file_changes({}, now) == [], "an older record without digests"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_is_one_sentence(work: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    graph = _graph(work)

    def symlink(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", symlink)
    with pytest.raises(UserError, match=r"tiny/clean: the file system has no symbolic links, .* with --out"):
        link(graph, graph.nodes["clean"])
    assert list((work / "runs/tiny").iterdir()) == []


def test_a_circle_and_a_wrong_kind_are_named(work: Path) -> None:
    with pytest.raises(UserError, match=r"stage\.base\.tokenizer: stage 'clean' is a corpus, expected a tokenizer"):
        _graph(work, 'stage.base.tokenizer="clean"')
    with pytest.raises(UserError, match=r"stage\.base\.data: no stage 'claen'; did you mean|no stage"):
        _graph(work, "stage.base.data={claen=1.0}")
    text = (
        (work / "tiny.toml")
        .read_text()
        .replace('tokenizer = "bpe"\nmodel = { depth = 2, width = 32, heads = 2, context = 32 }', 'init = "chat"')
    )
    (work / "tiny.toml").write_text(text)
    with pytest.raises(UserError, match="found the cycle"):
        _graph(work)


def test_the_files_of_a_tokenizer_are_in_its_key_and_their_place_is_not(work: Path) -> None:
    for name in ("one", "two"):
        (work / name).mkdir()
        (work / name / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    one, two, none = (
        f'stage.bpe={{kind = "tokenizer", type = "file", path = "{name}", template = "turns"}}'
        for name in ("one", "two", "none")
    )
    assert _keys(work, one) == _keys(work, two)
    before = _keys(work, two)
    (work / "two" / "chat_template.jinja").write_text("{{ messages }}")
    after = _keys(work, two)
    assert {n for n in before if before[n] != after[n]} == {"bpe", "clean@bpe", "talk@bpe", "base", "chat", "card"}
    missing = {name: node.missing for name, node in _graph(work, none).nodes.items() if node.missing}
    assert list(missing) == ["bpe"]
    assert str(missing["bpe"]).startswith("stage.bpe: none: no such directory")


@pytest.mark.parametrize("beside", ["", "chat_template.jinja", "tokenizer_config.json", "template of our own"])
def test_a_tokenizer_without_a_chat_template_is_refused_before_anything_runs(work: Path, beside: str) -> None:
    """As base models' are: found out otherwise when the base is trained and conversations are encoded."""
    table: dict[str, Any] = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    (work / "one").mkdir()
    (work / "one" / "tokenizer.json").write_text(json.dumps(table | ({"template": "turns"} if "own" in beside else {})))
    if "." in beside:
        (work / "one" / beside).write_text('{"chat_template": "{{ messages }}"}')
    of_files = 'stage.bpe={kind = "tokenizer", type = "file", path = "one"}'
    assert has_template(work / "one") == bool(beside)
    (work / "two").mkdir()
    (work / "two" / "tokenizer.json").write_text("[]")
    assert has_template(work / "two"), "what cannot be read is another error"
    if beside:
        _graph(work, of_files)
        return
    with pytest.raises(UserError, match=r"stage.chat.data: 'talk' has format = \"chat\", but one has no chat template"):
        _graph(work, of_files)


def test_only_takes_what_a_stage_stands_on_and_each_once(work: Path) -> None:
    graph = _graph(work)
    assert [n.name for n in graph.needed(["chat", "bpe"])] == [
        "clean", "talk", "bpe", "clean@bpe", "base", "talk@bpe", "chat"
    ]  # fmt: skip
    rounds = """
[repeat]
rounds = 200
stages = ["chat"]
start = { chat = "base" }
"""
    text = (work / "tiny.toml").read_text().replace('init = "base"', 'init = "chat"') + rounds
    (work / "many.toml").write_text(text)
    graph = load_graph(Path("many.toml"), [], Path("runs"))
    assert len(graph.needed(["chat-200"])) == 200 + 6  # neither too deep nor as often as there are ways there


def test_a_corpus_of_text_keeps_out_the_task_files_that_its_recipe_evaluates(work: Path) -> None:
    """By default, and by the key; conversations, and `decontaminate = []`, keep them in."""
    task = work / "mine.jsonl"
    task.write_text('{"task": "mine"}\n{"prompt": "Where does the river rise?", "answer": "here"}\n')
    tasks = f'stage.card.tasks=["{task}", "icl-copy"]'
    corpora = {name: node.settings for name, node in _graph(work, tasks).nodes.items() if name in CORPORA}
    assert {name: s.decontaminate for name, s in corpora.items()} == {"clean": [str(task)], "talk": []}
    assert {name: s.overlap_with for name, s in corpora.items()} == {"clean": [], "talk": [str(task)]}
    assert _changed(work, tasks) == {"clean", "bpe", "clean@bpe", "talk@bpe", "base", "chat", "card"}
    kept_in = "stage.clean.decontaminate=[]"
    before, after = _keys(work, kept_in), _keys(work, kept_in, tasks)
    assert {name for name in before if before[name] != after[name]} == {"card"}


def test_the_stored_order_is_refused_where_rows_are_packed_by_length(work: Path) -> None:
    stored = 'stage.chat.order="stored"'
    with pytest.raises(UserError, match=r"stage.chat.order: found stored for 'talk', which best-fit packs by length"):
        _graph(work, stored)
    _graph(work, stored, 'stage.chat.packing.kind="concat"')


CORPORA = ("clean", "talk")
