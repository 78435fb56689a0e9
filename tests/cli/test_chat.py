"""`ingot generate` and `ingot chat` as somebody at a terminal sees them."""

import json
import sys
from types import SimpleNamespace

import pytest

from ingot.cli.app import main
from ingot.cli.chat import Dialogue, read_prompts
from ingot.core.errors import UserError
from ingot.tokenizer.byte_bpe import Char
from ingot.tokenizer.chat import parse_conversation, render
from ingot.tokenizer.settings import TURNS


@pytest.fixture
def ingot_here(monkeypatch, capsys):
    """The command line in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ingot", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def typed(monkeypatch):
    """Lines that somebody types; an exception among them is raised at the prompt."""

    def lines(*entered):
        left = iter(entered)

        def read(prompt):
            print(prompt, end="")
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)

    return lines


class Parrot:
    """A model that answers with the pieces it was given, and notes what it was shown."""

    def __init__(self, tokenizer, context=10_000, pieces=("so ", "it ", "is")):
        self.loaded = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(context=context))
        self.pieces, self.shown, self.options = pieces, [], []

    def stream(self, messages, **options):
        self.shown.append([m["content"] for m in messages])
        self.options.append(options)
        return _Pieces(self.pieces)


class _Pieces:
    def __init__(self, pieces):
        self.pieces = pieces
        self.answer = SimpleNamespace(completion=SimpleNamespace(stop_reason="stop", ids=[1, 2]))

    def __iter__(self):
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


@pytest.fixture
def parrot(babbler):
    return lambda **options: Parrot(babbler.loaded.tokenizer, **options)


def test_generate_streams_one_text_and_says_why_it_ended(ingot_here, stage, babbler):
    code, out, err = ingot_here("generate", stage, "ab", "--max-new", 9, "--seed", 2)
    assert (code, out) == (0, "ab" + babbler.generate("ab", max_new=9, seed=2) + "\n")
    assert "cut after 9 tokens; --max-new" in err
    _, _, err = ingot_here("generate", stage, "ab")
    assert "the model's context is full" in err
    _, out, err = ingot_here("generate", stage, "ab", "--stop", "b", "--temperature", 1.5)
    assert out.startswith("ab")
    assert "b" not in out[2:]
    assert err == ""
    (stage / "DONE").unlink()
    _, _, err = ingot_here("generate", stage, "ab", "--stop", "b", "--temperature", 1.5)
    assert err == f"{stage}: not done; these are its weights after step 1\n"


def test_generate_takes_several_prompts_and_samples(ingot_here, stage, tmp_path):
    file = tmp_path / "more.txt"
    file.write_text("a a\n\nb b\n")
    arguments = ("generate", stage, "ab", "--prompts", file, "--samples", 2, "--max-new", 5)
    _, out, _ = ingot_here(*arguments, "--json")
    found = json.loads(out)
    assert [(r["prompt"], r["sample"]) for r in found] == [(p, s) for p in ("ab", "a a", "b b") for s in (0, 1)]
    assert {(r["stop_reason"], r["tokens"]) for r in found} == {("length", 5)}
    assert all(r["logp_nats"] < 0 for r in found)
    _, out, err = ingot_here(*arguments, "--jsonl")
    assert [json.loads(line) for line in out.splitlines()] == found
    assert err == ""
    _, out, _ = ingot_here(*arguments)
    assert out == "".join(f"--- {n} of 6\n{r['prompt']}{r['text']}\n" for n, r in enumerate(found, 1))


def test_every_setting_arrives(ingot_here, stage, babbler):
    settings = {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4, "seed": 5}
    arguments = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    _, out, _ = ingot_here("generate", stage, "ab", "--max-new", 30, *arguments)
    assert out == "ab" + babbler.generate("ab", max_new=30, **settings) + "\n"
    for name, value in {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 3.0, "temperature": 0.5}.items():
        assert babbler.generate("ab", max_new=30, **{**settings, name: value}) + "\n" != out[2:], name


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.txt", b"\n  \n", ["x.txt", "no prompt"]),
        ("x.txt", b"\xff\xfe", ["x.txt", "UTF-8", "byte 0"]),
        ("x.jsonl", b'{"prompt": "a"}\n\nnothing\n', ["x.jsonl, line 3", "not JSON"]),
        ("x.jsonl", b'{"text": "a", "id": 1}\n', ["x.jsonl, line 1", "id, text", "prompt"]),
        ("x.jsonl", b"[1]\n", ["x.jsonl, line 1", "list"]),
    ],
)
def test_a_bad_file_of_prompts_is_one_sentence(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_prompts(tmp_path / name)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_prompts_of_a_file(ingot_here, stage, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "two\\nlines", "id": 7}\n{"prompt": "€"}\n')
    assert read_prompts(tmp_path / "x.jsonl") == ["two\nlines", "€"]
    code, _, err = ingot_here("generate", stage, "--prompts", tmp_path / "none.txt")
    assert code == 2
    assert "none.txt: No such file" in err
    code, _, err = ingot_here("generate", stage, "--top-p", 0)
    assert code == 2
    assert "top_p: found 0.0, expected" in err


def test_chat_answers_and_remembers(ingot_here, stage, typed, tmp_path):
    path = tmp_path / "talk.jsonl"
    typed("ab", "/save", f"/save {path}", "ba", f"/save {path}", "/quit")
    code, out, err = ingot_here("chat", stage, "--system", "be brief", "--max-new", 10)
    assert code == 0, err
    assert out.count("it>  ") == 2
    assert "/save: expected a file" in err
    messages = parse_conversation(path.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "be brief"
    assert f"it>  {messages[2]['content']}" in out


def test_chat_refuses_a_stage_that_never_saw_a_conversation(ingot_here, stage, make_store, tmp_path):
    root = stage.parent
    text, talk = make_store([[1, 2, 3]]).path, make_store([[1, 2, 3]], masks=[[0, 1, 1]]).path

    def data(path):
        (root / path.name).mkdir(exist_ok=True)
        (root / path.name / "val").unlink(missing_ok=True)
        (root / path.name / "val").symlink_to(path)
        return {"name": path.name, "key": "", "dir": f"{root.name}/{path.name}"}

    def record(directory, **inputs):
        directory.mkdir(exist_ok=True)
        (directory / "inputs.json").write_text(json.dumps({"kind": "train", "settings": {}, "inputs": inputs}))
        return {"name": directory.name, "key": "", "dir": f"{root.name}/{directory.name}"}

    text, talk = data(text), data(talk)
    parent = record(root / "parent", **{"data:x": text})
    from ingot.cli.chat import require_conversations
    from ingot.stages.models.lineage import is_chat_model

    ours, theirs = SimpleNamespace(template=TURNS), SimpleNamespace(template="{{ messages }}")
    for inputs in ({"data:x": text}, {"data:x": text, "init": parent}):
        record(stage, **inputs)
        code, _, err = ingot_here("chat", stage)
        assert code == 2
        assert "trained on plain text only" in err
        assert err.count("\n") == 1
        assert not is_chat_model(stage, theirs)
    for inputs in (
        {"data:x": text, "data:y": talk},
        {"data:x": text, "init": record(root / "parent", **{"data:x": talk})},
    ):
        record(stage, **inputs)
        require_conversations(stage)
        assert is_chat_model(stage, ours)
    imported = root / "imported"  # of a stage of another run
    imported.mkdir()
    (imported / "inputs.json").write_text(json.dumps({"kind": "import", "settings": {}, "inputs": {}}))
    for known in (True, False):
        (imported / "result.json").write_text(json.dumps({"trained_on_conversations": known}))
        assert is_chat_model(imported, ours) is is_chat_model(imported, theirs) is known
    record(stage, **{"data:x": {"name": "x", "key": "", "dir": "gone"}})  # nobody knows
    require_conversations(stage)
    assert is_chat_model(stage, theirs)
    assert not is_chat_model(stage, ours)


def test_a_tokenizer_without_a_chat_format_is_refused_at_once():
    with pytest.raises(UserError, match="format chat: a char tokenizer"):
        Dialogue(Parrot(Char("ab")))


def test_ctrl_c_stops_the_answer_and_not_the_session(parrot, typed, capsys):
    model = parrot(pieces=("half ", KeyboardInterrupt()))
    dialogue = Dialogue(model)
    typed("one", KeyboardInterrupt(), "two")
    dialogue.run()
    assert [m["content"] for m in dialogue.messages] == ["one", "half ", "two", "half "]
    out, err = capsys.readouterr()
    assert err.count("[stopped]") == 2
    assert "/quit or Ctrl-D ends" in err
    assert out.count("half ") == 2
    model.pieces = (KeyboardInterrupt(),)
    typed("three")
    dialogue.run()
    assert len(dialogue.messages) == 4  # nothing was said, so nothing is remembered


def test_commands(parrot, typed, capsys, tmp_path):
    model = parrot()
    dialogue = Dialogue(model, system="old", temperature=0.3)
    typed("one", "/system new words", "two", "/reset", "three", "/system", "four", "/sve x", "/help", "")
    dialogue.run()
    answer = "so it is"
    assert model.shown == [
        ["old", "one"],
        ["new words", "one", answer, "two"],
        ["new words", "three"],
        ["three", answer, "four"],
    ]
    assert {o["temperature"] for o in model.options} == {0.3}
    assert len({o["step"] for o in model.options[:2]}) == 2  # another answer to the same words, later
    out, err = capsys.readouterr()
    assert "did you mean '/save'?" in err
    assert all(command in out for command in ("/reset", "/system TEXT", "/save FILE", "/help", "/quit"))
    (tmp_path / "there").write_text("precious")
    typed(f"/save {tmp_path / 'there'}", "/reset", f"/save {tmp_path / 'new'}")
    dialogue.run()
    _, err = capsys.readouterr()
    assert "exists already" in err
    assert "no message to save" in err
    assert (tmp_path / "there").read_text() == "precious"


def test_several_lines_are_one_message(parrot, typed):
    model = parrot()
    typed('"""', "def f():", "    return 1", '"""', '"""short"""', '"""first', 'last"""')
    Dialogue(model).run()
    assert [shown[-1] for shown in model.shown] == ["def f():\n    return 1", "short", "first\nlast"]


def test_a_long_conversation_drops_its_oldest_turns_and_says_so(parrot, typed, capsys, babbler):
    model = parrot(context=71, pieces=("b" * 8,))  # dropping the oldest message alone would be enough
    dialogue = Dialogue(model, system="s" * 6, max_new=20)
    typed(*(f"message {n}" for n in range(5)))
    dialogue.run()
    for n, shown in enumerate(model.shown):
        assert shown[0] == "s" * 6
        assert shown[-1] == f"message {n}"
        assert len(shown) % 2 == 0, "a turn was cut in two"
        roles = ["system", *["user", "assistant"] * 4]
        messages = [{"role": r, "content": c} for r, c in zip(roles, shown, strict=False)]
        assert len(render(messages, babbler.loaded.tokenizer, generation_prompt=True)[0]) <= 51
    assert [len(shown) for shown in model.shown] == [2, 4, 4, 4, 4]
    assert capsys.readouterr().err.count("oldest") == 3
    assert len(dialogue.messages) == 10  # all of it can still be saved


def test_a_message_longer_than_the_context_is_refused_and_forgotten(ingot_here, stage, typed):
    typed("ab" * 200, "ab")
    code, out, err = ingot_here("chat", stage, "--max-new", 5)
    assert code == 0
    assert err.count("fill the model's context of 96") == 1
    assert out.count("it>  ") == 1
