"""G2: streamed text equals the final text: complete characters only, and nothing of a stop string."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot import api
from ingot.core.errors import UserError
from ingot.infer.sampling import Sampling
from ingot.infer.streaming import TextGeneration, TextStream, prompt_ids
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.tokenizer.byte_bpe import Char

LETTERS = st.sampled_from("ab €😀é")
TEXTS = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=3)
CUTS = st.lists(st.integers(0, 120), max_size=20)


def _cut(text: str, stops: list[str]) -> str:
    """The definition, letter by letter: before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@settings(max_examples=400, deadline=None)
@given(TEXTS, STOPS, CUTS)
def test_G2_what_was_shown_is_the_text_however_it_was_cut(text, stops, cuts):
    stream, shown = TextStream(stops), ""
    data = text.encode()
    for piece in _pieces(data, cuts):
        new = stream.feed(piece)
        assert "\ufffd" not in new
        shown += new
    assert shown + stream.finish() == _cut(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)
    assert stream.feed(b"more") + stream.finish() == ("" if stream.stopped else "more")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30), CUTS)
def test_G2_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(data, cuts):
    stream = TextStream()
    shown = "".join(map(stream.feed, _pieces(data, cuts))) + stream.finish()
    assert shown == data.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_G2_only_what_may_begin_a_stop_string_is_held_back(text, stops):
    stream, shown = TextStream(stops), ""
    for end, letter in enumerate(text, 1):
        shown += stream.feed(letter.encode())
        if stream.stopped:
            break
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_property_fails_for_a_stream_that_holds_nothing_back():
    """The control: the same pieces through a stream that shows everything at once."""

    class Hasty(TextStream):
        def _partial_match(self, stop: str) -> int:
            return 0

    def shown(kind):
        stream = kind(["END"])
        return "".join(map(stream.feed, [b"the E", b"N", b"D", b"!"])) + stream.finish()

    assert shown(TextStream) == "the "
    assert shown(Hasty) != "the "


def test_a_stop_string_inside_another_one():
    stream = TextStream(["bc", "abcd"])
    assert stream.feed(b"xabcd") == "xa"  # "bc" is complete first
    stream = TextStream(["bc", "abc"])
    assert stream.feed(b"xab") + stream.feed(b"c") == "x"  # both are complete at once: the longer one


def _ids(model, *prompts):
    return [[model.loaded.tokenizer.eot, *model.loaded.tokenizer.encode(p).tolist()] for p in prompts]


def _run(model, prompts, stop=(), sampling=None, **options):
    loaded = model.loaded
    sampling = sampling or Sampling(max_new=40, temperature=1.5)
    return TextGeneration(loaded.model.eval(), loaded.tokenizer, prompts, sampling, stop=stop, **options)


def test_G2_a_run_gives_the_text_of_its_tokens_in_complete_characters(babbler):
    prompts = _ids(babbler, "a", "ba ab")
    run = _run(babbler, prompts, samples=4)
    shown = [""] * 8
    for place, piece in run.pieces:
        shown[place] += piece
    split = 0
    for text, answer in zip(shown, run.answers(), strict=True):
        ids = answer.completion.ids
        assert text == answer.text == str(answer) == babbler.loaded.tokenizer.decode(ids)
        split += sum(babbler.loaded.tokenizer.decode([i]).count("\ufffd") > 0 for i in ids)
    assert split > 5, "no token ended inside a character: the test shows nothing"


def test_G2_stop_strings_end_their_row_and_are_cut_off(babbler):
    prompts = _ids(babbler, "a", "b", "ab")
    free = _run(babbler, prompts, samples=4).answers()
    stop = ["€b", "a b"]
    stopped = _run(babbler, prompts, stop, samples=4).answers()
    crossed = 0
    for complete, cut in zip(free, stopped, strict=True):
        assert cut.text == _cut(complete.text, stop)
        found = any(s in complete.text for s in stop)
        assert cut.completion.stop_reason == ("stop_string" if found else "length")
        ids = cut.completion.ids.tolist()
        assert ids == complete.completion.ids[: len(ids)].tolist()
        if found:
            assert not any(s in babbler.loaded.tokenizer.decode(ids[:-1]) for s in stop), "went on after the stop"
            crossed += not any(s in babbler.loaded.tokenizer.decode(ids[-1:]) for s in stop)
    assert crossed >= 3, "every stop string was a single token: the test shows nothing"
    assert {a.completion.stop_reason for a in stopped} == {"stop_string", "length"}


def test_G2_a_stop_id_ends_the_text_without_showing(babbler):
    token = int(babbler.loaded.tokenizer.encode("ab")[0])
    sampling = Sampling(max_new=40, temperature=1.5, stop=frozenset({token}))
    answers = _run(babbler, _ids(babbler, "a", "b"), sampling=sampling, samples=4).answers()
    for answer in answers:
        ids = answer.completion.ids.tolist()
        assert (answer.completion.stop_reason == "stop") == (ids[-1] == token)
        assert answer.text == babbler.loaded.tokenizer.decode([i for i in ids if i != token])
    assert any(a.completion.stop_reason == "stop" for a in answers)


def test_an_empty_stop_string_is_refused_and_one_string_is_one(babbler):
    text = babbler.generate("a", temperature=1.5, stop="a ")
    assert text == babbler.generate("a", temperature=1.5, stop=["a "])
    assert "a" in text, "its letters were taken for stop strings, or the test shows nothing"
    with pytest.raises(UserError, match="empty string"):
        _run(babbler, _ids(babbler, "a"), stop=["x", ""])


def test_the_python_api(babbler, monkeypatch):
    options = {"max_new": 12, "temperature": 1.5, "seed": 3}
    text = babbler.generate("ab", **options)
    stream = babbler.stream("ab", **options)
    pieces = list(stream)
    assert len(pieces) > 2
    assert "".join(pieces) == stream.answer.text == text
    assert babbler.generate(["ab", "ba"], **options)[0] == text
    answers = list(babbler.complete(["ab", "ba", "a"], samples=3, **options))
    assert answers[0].text == text
    assert len({a.text for a in answers}) == 9
    for rows, memory in ((1, 1 << 30), (2, 1 << 30), (4, 1 << 30), (64, 2**14)):
        monkeypatch.setattr(api, "MAX_ROWS", rows)
        monkeypatch.setattr(api, "MAX_CACHE_BYTES", memory)
        again = babbler.complete(["ab", "ba", "a"], samples=3, **options)
        assert [a.text for a in again] == [a.text for a in answers]
    messages = [{"role": "user", "content": "ab"}]
    assert babbler.chat(messages, **options) == "".join(babbler.stream(messages, **options)) != ""


def test_the_python_api_refuses_before_it_begins(babbler):
    with pytest.raises(UserError, match="prompt 3 has 201 tokens"):
        next(babbler.complete(["a", "b", "b" * 200], samples=64, max_new=1))
    with pytest.raises(UserError, match="temperature"):
        babbler.generate("a", temperature=-1)
    with pytest.raises(UserError, match="samples: found 0"):
        next(babbler.complete(["a"], samples=0))
    for unknown in ("temprature", "samples"):  # a single text has no samples
        with pytest.raises(TypeError, match=unknown):
            babbler.generate("a", **{unknown: 2})


def test_log_probabilities_come_with_the_text(babbler):
    (answer,) = babbler.complete(["ab"], max_new=7)
    assert answer.completion.logps.shape == answer.completion.ids.shape == (7,)
    assert np.all(answer.completion.logps <= 0)


def test_a_prompt_begins_as_the_model_has_learned_texts(babbler):
    tokenizer = babbler.loaded.tokenizer
    assert prompt_ids(tokenizer, "") == tokenizer.start_ids == [tokenizer.eot]
    assert prompt_ids(tokenizer, "ab") == [tokenizer.eot, *tokenizer.encode("ab")]
    assert prompt_ids(Char("ab"), "ba") == [1, 0]
    assert prompt_ids(Char("ab"), "") == [0]  # nothing to begin with, but a model must read something


def test_the_precision_is_chosen_when_a_model_is_loaded(stage):
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = api.load(stage, device="cpu", precision=precision)
        assert model.decoder().dtype == dtype
        assert len(next(model.complete(["a"], max_new=5)).completion.ids) <= 5
        assert model.loaded.model.embedding.weight.dtype == torch.float32
    with pytest.raises(UserError, match="fp8"):
        api.load(stage, precision="fp8")


def test_a_changed_model_goes_on_as_it_is_now(stage):
    """Old matrices beside the new embedding would be neither the old model nor the new one."""
    model = api.load(stage, device="cpu")
    before, decoder = model.generate("a", max_new=8, temperature=0), model.decoder()
    assert model.decoder() is decoder
    with torch.no_grad():
        for parameter in model.loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = model.generate("a", max_new=8, temperature=0)
    assert model.decoder() is not decoder
    assert after == api.LanguageModel(model.loaded).generate("a", max_new=8, temperature=0)
    assert after != before
    with torch.inference_mode():  # whose tensors do not count their changes
        made = api.load(stage, device="cpu")
    assert made.generate("a", max_new=8, temperature=0) == before


def test_a_blank_that_ends_the_prompts_last_word_precedes_the_continuation(tmp_path):
    """Where a piece ends a word instead of beginning one; after the begin of text there is none."""
    from ingot.tokenizer.hf_files import import_tokenizer
    from tests.tokenizer.published import SHAPES

    tokenizer = import_tokenizer(SHAPES["CLIP"](tmp_path))
    model = build(ModelSettings(depth=1, width=16, heads=2, context=24).resolve(tokenizer.vocab), seed=1)
    prompts = [prompt_ids(tokenizer, "the cat"), prompt_ids(tokenizer, "")]
    first, second = TextGeneration(model, tokenizer, prompts, Sampling(max_new=3)).answers()
    assert first.text == " " + tokenizer.decode_bytes(first.completion.ids).decode(errors="replace")
    assert second.text == tokenizer.decode_bytes(second.completion.ids).decode(errors="replace")
