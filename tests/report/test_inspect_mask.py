"""`ingot inspect mask`: what is trained on, from a store, from a corpus, and as a train stage's rows hold it."""

import json
import shutil

import pytest
from rich.console import Console

from ingot.core.artifact import atomic_json, atomic_write
from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.report.inspect import mask as inspect_mask
from ingot.report.inspect.mask import mask, print_mask
from ingot.stages.job import MODEL, TOKENIZER, read_record


def _text(document, learned):
    return "".join(text for text, on in document["pieces"] if on == learned)


def test_answers_with_their_ends_are_trained_on_and_nothing_else(finished, capsys):
    data = mask(finished.root / "small" / "questions@bpe", 2)
    (store,) = data["stores"]
    assert (data["stage"], store["content"], len(store["documents"])) == ("questions@bpe", "chat", 2)
    for document in store["documents"]:
        assert _text(document, False).startswith("<|user|>What is")
        assert _text(document, False).endswith("<|end|><|assistant|>")
        assert _text(document, True).startswith("It is")
        assert _text(document, True).endswith(".<|end|>")
        assert (
            document["tokens"]
            == len(document["pieces"])
            == document["trained"] + sum(not learned for _, learned in document["pieces"])
        )
    assert json.loads(json.dumps(data)) == data
    print_mask(data)
    assert f"<|assistant|>⟦{_text(store['documents'][0], True)}⟧" in capsys.readouterr().out


def test_in_colour_the_borders_of_tokens_show(finished, capsys, monkeypatch):
    terminal = Console(force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr(inspect_mask, "console", lambda: terminal)
    print_mask(mask(finished.root / "small" / "questions@bpe", 1))
    shown = capsys.readouterr().out
    assert "⟦" not in shown
    assert "\x1b[32m" in shown  # green
    assert "\x1b[1;32m" in shown  # bold green: the next token
    assert "\x1b[2m" in shown  # dim


def test_a_corpus_is_shown_as_it_was_encoded(finished):
    named = mask(finished.root / "small" / "questions", 1)
    assert named["stores"] == mask(finished.root / "small" / "questions@bpe", 1)["stores"]


def test_text_is_trained_on_as_a_whole(finished):
    (document,) = mask(finished.root / "small" / "clean@bpe", 1)["stores"][0]["documents"]
    assert document["trained"] == document["tokens"]


def test_a_train_stage_shows_what_its_rows_hold(finished, tmp_path, capsys):
    """The context cuts one conversation's answer short; of another it leaves no learned token, so no row holds it."""
    root = tmp_path / "runs"
    shutil.copytree(finished.root, root, symlinks=True)
    base, chat = ((root / "small" / name).resolve() for name in ("base", "chat"))
    tokenizer = root / read_record(base)["inputs"]["tokenizer"]["dir"] / TOKENIZER
    shutil.copy(tokenizer, chat / TOKENIZER)
    config = ModelSettings(depth=2).resolve(300)
    atomic_write(base / MODEL, config.model_dump_json())
    (whole, *_) = mask(root / "small" / "questions", 1)["stores"][0]["documents"]
    first_learned = [learned for _, learned in whole["pieces"]].index(True)
    for context, held in ((first_learned + 1, first_learned + 2), (first_learned - 1, 0)):
        told = read_record(chat)
        told["settings"] |= {"context": context}
        atomic_json(chat / "inputs.json", told)
        if not held:
            with pytest.raises(UserError, match="its answer begins after that, so no target is left"):
                mask(chat, 1)
            continue
        data = mask(chat, 1)
        stores = {store["name"]: store for store in data["stores"]}
        assert list(stores) == ["questions", "clean"], "conversations come before text"
        (document,) = stores["questions"]["documents"]
        assert (len(document["pieces"]), document["cut"]) == (held, whole["tokens"] - held)
        assert document["trained"] == held - first_learned
        print_mask(data)
        assert f"{document['cut']:,} tokens beyond the context, not trained on" in capsys.readouterr().out


def test_other_stages_and_what_was_not_encoded_are_one_sentence(finished, empty):
    with pytest.raises(UserError, match="is of kind evaluate, expected a tokens, corpus or train stage"):
        mask(finished.dir("card").path, 1)
    lonely = empty.root / "small" / "clean"
    lonely.mkdir(parents=True)
    atomic_json(lonely / "inputs.json", {"name": "clean", "kind": "corpus", "key": "x", "settings": {}, "inputs": {}})
    with pytest.raises(UserError, match="no tokens stage of it in this run"):
        mask(lonely, 1)
    with pytest.raises(UserError, match=r"no inputs\.json"):
        mask(empty.root, 1)


def test_a_character_in_two_tokens_comes_with_the_second(finished):
    from ingot.tokenizer.byte_bpe import load_tokenizer

    tokenizer = load_tokenizer(finished.dir("bpe").path / TOKENIZER)
    ids = tokenizer.encode("é漢")
    pieces = inspect_mask._pieces(ids, [True] * len(ids), tokenizer)
    assert len(pieces) == 5
    assert "".join(text for text, _ in pieces) == "é漢"
