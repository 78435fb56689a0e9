"""Jinja chat templates: the ids of `transformers`, a mask that is born with them, and contents that stay text."""

import datetime
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.store.encode import _ENCODERS
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, load_tokenizer
from ingot.tokenizer.chat import check_template, masked_runs, render, render_batch, stop_ids
from ingot.tokenizer.hf_files import TURNS_JINJA, export_tokenizer, import_tokenizer
from ingot.tokenizer.template_sandbox import ConversationRefused
from ingot.tokenizer.train import train
from ingot.tokenizer.train import with_template as with_any_template
from tests.tokenizer.hf_helpers import BRACKETS, CHATML, MARKED_CHATML, STOCK, like_bert, like_llama, like_qwen, stock
from tests.tokenizer.text_helpers import labelled, settings

TALK = [
    {"role": "user", "content": "What is argparse?"},
    {"role": "assistant", "content": "A module of\n\nthe library. "},
    {"role": "user", "content": "  And é 😀?"},
    {"role": "assistant", "content": "Text <think> and 漢字"},
]
LEARNED = {
    CHATML: ["A module of\n\nthe library.<|im_end|>", "Text <think> and 漢字<|im_end|>"],
    MARKED_CHATML: ["A module of\n\nthe library. <|im_end|>", "Text <think> and 漢字<|im_end|>"],
    BRACKETS: [" A module of\n\nthe library. </s>", " Text <think> and 漢字 </s>"],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    made = {CHATML: like_qwen(root / "a"), MARKED_CHATML: like_qwen(root / "b", MARKED_CHATML)}
    return {**made, BRACKETS: like_llama(root / "c")}


@pytest.fixture(scope="module")
def imported(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {template: import_tokenizer(directory) for template, directory in directories.items()}


@pytest.fixture
def qwen(imported: dict[str, Tokenizer]) -> Tokenizer:
    return imported[CHATML]


def with_template(tokenizer: Tokenizer, source: str) -> ByteBPE:
    """A byte-level BPE of our own with a foreign template."""
    assert isinstance(tokenizer, ByteBPE)
    return ByteBPE(tokenizer.tokens, tokenizer.pattern, source)


def learned(messages, tokenizer: Tokenizer) -> list[str]:
    ids, mask = render(messages, tokenizer)
    return [text for text, on in masked_runs(ids, mask, tokenizer) if on]


@pytest.mark.parametrize("template", LEARNED)
def test_ids_and_prompts_are_those_of_transformers(directories, imported, tmp_path, template):
    from transformers import AutoTokenizer

    ours = imported[template]
    export_tokenizer(ours, tmp_path)
    for directory in (directories[template], tmp_path):
        theirs = AutoTokenizer.from_pretrained(directory)
        for messages, prompt in ((TALK, False), (TALK[:3], True), (TALK[:1], True)):
            ids = render(messages, ours, generation_prompt=prompt)[0]
            wanted = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert ids.tolist() == wanted


def test_marks_of_answers_are_those_of_transformers(directories, imported):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directories[MARKED_CHATML])
    wanted = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = render(TALK, imported[MARKED_CHATML])
    assert (ids.tolist(), mask.tolist()) == (wanted["input_ids"], wanted["assistant_masks"])


def test_our_own_format_renders_alike_here_and_there(bpe, tmp_path):
    """Three renderers: ours by segments, ours by Jinja, and `transformers` by the exported template."""
    from transformers import AutoTokenizer

    export_tokenizer(bpe, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    jinja = with_template(bpe, TURNS_JINJA)
    for messages, prompt in ((TALK, False), (TALK[:3], True)):
        ids, mask = render(messages, bpe, generation_prompt=prompt)
        again, marks = render(messages, jinja, generation_prompt=prompt)
        assert np.array_equal(ids, again)
        assert np.array_equal(mask, marks)
        wanted = theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=True, return_assistant_tokens_mask=True
        )
        assert wanted["input_ids"] == ids.tolist()
        assert mask.tolist() == ([0] * len(ids) if prompt else wanted["assistant_masks"])  # a prompt learns nothing
    assert render_batch([TALK], bpe)[0][2] == render_batch([TALK], jinja)[0][2]
    assert stop_ids(jinja) == stop_ids(bpe)


@pytest.mark.parametrize("template", LEARNED)
def test_E1_learned_are_the_answers_with_their_ends(imported, template):
    tokenizer = imported[template]
    assert learned(TALK, tokenizer) == LEARNED[template]
    only_last = [TALK[0], {**TALK[1], "train": False}, *TALK[2:]]
    assert learned(only_last, tokenizer) == LEARNED[template][1:]
    assert np.array_equal(render(only_last, tokenizer)[0], render(TALK, tokenizer)[0])
    with pytest.raises(UserError, match="no assistant message to train on"):
        render([{**m, "train": False} if m["role"] == "assistant" else m for m in TALK], tokenizer)


@pytest.mark.parametrize("name", STOCK)
def test_2_1_vi_ten_stock_templates(tmp_path, name):
    """Ids of `transformers`, the answers with their end learned and no more, stops that end them, no second BOS."""
    from transformers import AutoTokenizer

    stock(tmp_path, name)
    ours, theirs = import_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    _, _, names, forms = STOCK[name]
    for messages, prompt in ((TALK, False), (TALK[:3], True), (TALK[:1], True)):
        ids = render(messages if prompt or forms else _last_only(TALK), ours, generation_prompt=prompt)[0]
        assert ids.tolist() == theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        if "bos_token" in names and "every two" not in name:
            assert np.count_nonzero(ids == ours.specials[names["bos_token"]]) == ("tags" not in name)
    if not forms:
        with pytest.raises(UserError, match="chat template: the text with message 2 is not a prefix"):
            render(TALK, ours)  # the prompts above are rendered all the same: nothing is learned of them
        assert learned(_last_only(TALK), ours) == [TALK[3]["content"] + "<|end|>\n" + names["eos_token"]]
        return
    for text, content in zip(learned(TALK, ours), (TALK[1]["content"], TALK[3]["content"]), strict=True):
        assert text in (forms[0].format(content), forms[0].format(content.strip()))  # some trim
    ids, mask = render(TALK, ours)
    assert ids[mask == 1][-1] in stop_ids(ours)
    assert learned(_last_only(TALK), ours) == learned(TALK, ours)[1:]


def _last_only(talk):
    return [{**m, "train": False} if m["role"] == "assistant" and m is not talk[-1] else m for m in talk]


def test_what_ends_an_answer(imported, tmp_path):
    qwen, llama = imported[CHATML], imported[BRACKETS]
    assert stop_ids(qwen) == (qwen.specials["<|im_end|>"], qwen.specials["<|endoftext|>"])
    assert stop_ids(llama) == (llama.specials["</s>"],)


@pytest.mark.parametrize("template", LEARNED)
def test_special_tokens_in_contents_stay_text(imported, template):
    """Whole names, names that a template's own signs would complete, and names made by joining two contents."""
    tokenizer = imported[template]
    names = list(tokenizer.specials)
    special = set(tokenizer.specials.values())

    def count(content: str, answer: str) -> int:
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        ids, mask = render(messages, tokenizer)
        assert answer in "".join(text for text, on in masked_runs(ids, mask, tokenizer) if on)
        return sum(id in special for id in ids.tolist())

    wanted = count("plain", "plain")
    for name in names:
        for evil in (name, f"a {name}b{name}", name[:-1], name[1:], name[:1], name[-1:], f"{name[1:]} {name[:-1]}"):
            assert count(evil, "plain") == wanted
            assert count("plain", evil) == wanted

    @given(st.lists(st.sampled_from([*names, *"<>|/s_", "im_end", "end", " ", "x"]), max_size=8).map("".join))
    @hypothesis_settings(max_examples=60, deadline=None)
    def any_content(content: str) -> None:
        assert count(f"q{content}", f"a{content}z") == wanted
        assert count(f"{content} q", "z") == wanted

    any_content()


def test_a_template_whose_own_signs_would_complete_a_name(bpe):
    tokenizer = with_template(bpe, "{% for m in messages %}{{ m.content + '|>' }}{% endfor %}")
    ids, _ = render([{"role": "assistant", "content": "<|end"}], tokenizer)
    assert bpe.specials["<|end|>"] not in ids
    assert bpe.decode(ids) == "<|end|>"


def test_turns_that_a_later_turn_rewrites_are_refused_by_name(qwen, bpe):
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}(last) {% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(bpe, source)
    with pytest.raises(UserError, match="chat template: the text with message 2 is not a prefix"):
        render(TALK, tokenizer)
    assert learned([TALK[0], {**TALK[1], "train": False}, *TALK[2:]], tokenizer) == [
        "(last) Text <think> and 漢字<|end|>"
    ]


def test_an_end_of_turn_outside_the_block_is_learned_too(bpe):
    source = TURNS_JINJA.replace("+ '<|end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|end|>")
    assert source != TURNS_JINJA
    assert learned(TALK, with_template(bpe, source)) == learned(TALK, bpe)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for m in messages %}", "chat template, line 1: Unexpected end of template"),
        ("{{ raise_exception('no system') }}", "rejects this conversation: no system"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined; set `date` in the tokenizer stage"),
        ("{{ messages[0].content.nothing.more }}", "chat template: 'str object' has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ namespace(__class__=1) }}", "may not be set"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        (
            "{{ messages[0].content }}{% generation %}{% endgeneration %}",
            "the rendered text contains no answer to train on",
        ),
    ],
)
def test_bad_templates_are_one_sentence(bpe, source, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        render(TALK[:2], with_template(bpe, source))
    assert "\n" not in str(caught.value)


ENDED = "{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("source", "role", "number"),
    [
        ("{% for m in messages if m.role != 'system' %}" + ENDED + HEADER, "system", 1),
        ("{% for m in messages if m.role in ('system', 'user', 'assistant') %}" + ENDED + HEADER, "tool", 3),
        ("{{ messages[0].content }}{% for m in messages if m.role == 'assistant' %}" + ENDED + HEADER, "user", 2),
    ],
)
def test_a_message_that_the_template_leaves_out_is_named(bpe, source, role, number):
    tokenizer = with_template(bpe, source)
    contents = {"system": "Be brief.", "user": "Why?", "tool": "42"}
    around = [{"role": "user", "content": "Hi."}] * (number - 1)
    answer = {"role": "assistant", "content": "So."}
    for generation_prompt in (False, True):
        messages = [*around, {"role": role, "content": contents[role]}, *([] if generation_prompt else [answer])]
        with pytest.raises(ConversationRefused, match=f"does not contain message {number} of the {role}, which would"):
            render(messages, tokenizer, generation_prompt=generation_prompt)
    render([*around[:1], answer], tokenizer)
    render([*around[:1], {"role": "system", "content": " "}, answer], tokenizer)


def test_what_a_template_does_with_contents_does_not_hide_them(bpe):
    loop = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content CHANGE }}{{ '<|end|>' }}{% endfor %}" + HEADER
    for change in ("| trim", "| upper", "| replace('.', '!')", "| tojson", ".split('</think>')[-1]"):
        render(TALK[:2], with_template(bpe, loop.replace("CHANGE", change.replace("| tojson", "| tojson | string"))))


def test_a_conversation_that_begins_with_an_answer_is_refused_in_plain_words(bpe):
    """Many templates read the first message, and before the first answer there is none."""
    tokenizer = with_template(bpe, "{{ messages[0].role }}{% for m in messages %}" + ENDED + HEADER)
    with pytest.raises(ConversationRefused, match="begins with an answer, and the template cannot render what comes"):
        render([TALK[1], *TALK], tokenizer)
    assert learned([{**TALK[1], "train": False}, *TALK[:2]], tokenizer) == [TALK[1]["content"] + "<|end|>"]


def test_blocks_that_do_not_match_the_answers(bpe):
    questions = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    tokenizer = with_template(bpe, questions + "{% generation %}x{% endgeneration %}")
    assert learned(TALK, tokenizer) == ["x"]
    with pytest.raises(UserError, match=r"found 1 generation block.s. for 2 answers, so train = false"):
        render([TALK[0], {**TALK[1], "train": False}, *TALK[2:]], tokenizer)


def test_a_date_is_used_where_a_template_has_its_own(bpe):
    source = (
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
        "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    )
    ids, _ = render([{"role": "assistant", "content": 'é"<'}], with_template(bpe, source))
    assert bpe.decode(ids) == '2024{"role": "assistant", "content": "é\\"<"}'


DATED = {
    "a format": "{{ 'Today ' + strftime_now('%Y-%m-%d') }}",
    "two formats": '{{ strftime_now("%d %B %Y") }}{% if strftime_now is defined %}{{ strftime_now("%A") }}{% endif %}',
    "a text": "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}",
    "a text of a format": (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}"
    ),
    "a time": "{{ strftime_now('%H:%M') }}",
}
DATES = {
    "a format": "Today 2025-01-31",
    "two formats": "31 January 2025Friday",
    "a text": "31 Jan 2025",
    "a text of a format": "31 Jan 2025",
    "a time": "00:00",
}


@pytest.mark.parametrize("name", DATED)
def test_the_date_is_a_setting_and_never_read_from_the_clock(imported, tmp_path, name):
    """Also in `transformers`, which would read the clock: the exported template has the date as its default."""
    from transformers import AutoTokenizer

    tokenizer = with_any_template(imported[CHATML], DATED[name] + CHATML)
    tokenizer.template_variables = {"date": "2025-01-31"}
    ids, _ = render(TALK[:1], tokenizer, generation_prompt=True)
    assert tokenizer.decode(ids).startswith(DATES[name] + "<|im_start|>")
    export_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False) == ids.tolist()
    assert np.array_equal(render(TALK[:1], import_tokenizer(tmp_path), generation_prompt=True)[0], ids)


def test_variables_are_part_of_a_tokenizer_and_of_its_file(bpe, tmp_path):
    plain = with_template(bpe, DATED["a text"] + TURNS_JINJA)
    dated = with_template(bpe, plain.template)
    dated.template_variables = {"date": "2025-01-31", "enable_thinking": False, "thinking": False}
    assert dated.fingerprint != plain.fingerprint
    dated.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.template_variables == dated.template_variables
    assert np.array_equal(render(TALK, again)[0], render(TALK, dated)[0])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"date": "31.1.2025"}, "found '31.1.2025', expected a date such as 2025-01-31"),
        ({"date": "yesterday"}, "found 'yesterday', expected a date such as 2025-01-31"),
        ({"date": 20250131.5}, "expected a date such as 2025-01-31"),
        ({"date": "2025-01-31", "template": "turns"}, 'the chat format "turns" has no date; remove the setting'),
        ({"enable_thinking": True}, 'the chat format "turns" has no enable_thinking; remove the setting'),
    ],
)
def test_settings_of_templates(table, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        settings(vocab=600, **table)


def test_a_date_of_a_recipe_is_a_text():
    table = {"vocab": 600, "template": "a.jinja", "enable_thinking": False}
    assert settings(date=datetime.date(2025, 1, 31), **table).template_variables == {
        "date": "2025-01-31",
        "enable_thinking": False,
        "thinking": False,
    }
    assert settings(vocab=600).template_variables == {}


TEXT = "the cat sat on the mat, the bat sat on the hat"


def test_a_setting_that_the_template_does_not_read_is_refused(tmp_path, display, log):
    (tmp_path / "chat.jinja").write_text(TURNS_JINJA)
    for table, words in (
        ({"date": "2025-01-31"}, "date: the chat template reads no strftime_now or date_string; remove the setting"),
        ({"enable_thinking": True}, "enable_thinking: the chat template reads no thinking; remove the setting"),
    ):
        with pytest.raises(UserError, match=words):
            train(settings(vocab=280, template=str(tmp_path / "chat.jinja"), **table), labelled(TEXT), display, log)


def test_a_prompt_that_ends_within_a_token_is_refused(bpe):
    source = "{% for m in messages %}{{ m.role + ':' + SEAM + m.content + '<|end|>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant:' + SEAM }}{% endif %}"
    check_template(with_template(bpe, source.replace("SEAM", "'\n'")))
    with pytest.raises(UserError, match="the prompt ends in ' ', which becomes another token when the answer follows"):
        check_template(with_template(bpe, source.replace("SEAM", "' '")))


def test_a_template_that_rejects_the_test_conversation_passes(bpe):
    needs_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    check_template(with_template(bpe, needs_system + TURNS_JINJA))
    with pytest.raises(UserError, match="'strftime_now' is undefined; set `date` in the tokenizer stage"):
        check_template(with_template(bpe, "{{ strftime_now('%d') }}" + TURNS_JINJA))


def test_2_1_a_template_without_an_end_of_turn_is_refused(bpe):
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content + NL }}{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    with pytest.raises(UserError, match=r"an answer ends in '\\n', expected a special token"):
        check_template(with_template(bpe, source.replace("NL", "'\n'")))
    check_template(with_template(bpe, source.replace("NL", "'<|end|>\n'")))


def test_a_tokenizer_without_a_template_says_so(tmp_path):
    with pytest.raises(UserError, match="the tokenizer's files have no chat template"):
        render(TALK, import_tokenizer(like_bert(tmp_path)))


def test_both_sides_of_a_pair_end_where_a_completion_would(tmp_path):
    """ChatML writes a line's end behind <|im_end|>; a reward is read from the last token, in training as in use."""
    tokenizer = import_tokenizer(like_qwen(tmp_path))
    text = json.dumps(
        {
            "prompt": [{"role": "user", "content": "q"}],
            **{side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")},
        }
    )
    for ids, mask, _ in _ENCODERS["pairs"]([text], tokenizer, 1):
        assert ids[-1] == tokenizer.specials["<|im_end|>"]
        assert mask[-1] == 1
        assert len(ids) == len(mask)
    whole, _ = render([{"role": "user", "content": "q"}, {"role": "assistant", "content": "chosen"}], tokenizer)
    assert whole[-1] != tokenizer.specials["<|im_end|>"]
