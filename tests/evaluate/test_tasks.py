"""Task files: the format, the checks, and the suite that comes with the package."""

import json
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.evaluate.checks import CHECKS, is_correct
from ingot.evaluate.tasks import SUITE, Item, load_task, task_file

SHIPPED = sorted(path.stem for path in SUITE.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("name", "argument", "yes", "no"),
    [
        ("exact", "4", " 4\n", "4."),
        ("starts", "Certainly", " Certainly, yes", "I certainly"),
        ("ends", "!", "tea! ", "tea"),
        ("contains", ["River", "stone"], "a stone in the river", "a stone"),
        ("contains", "river", "River", "stream"),
        ("lacks", "blue", "a clear sky", "Blue"),
        ("lacks", "blue", "x", " "),  # saying nothing is no way to obey
        ("number", 1234, "12 x 3 = ... so it is 1,234.", "1,234 or 1,235"),
        ("number", -2.5, "-2.5", "2.5"),
        ("number", 4, "four is 4", "four"),
        ("number", 0.5, "x = .5", "x = 5"),
        ("number", 0.0015, "1.5e-3", "1.5e-2"),
        ("number", 4, "either 3,4", "34"),
        ("number", 567, "1234,567", "1,234,567"),
        ("number", -4, "it is -4", "3-4"),
        ("matches", "(?i)yes\\.?", " Yes.", "yes it is"),
        ("lines", 3, "a\n\nb\nc\n", "a\nb"),
        ("words", 2, "good day", "hello"),
        ("words_min", 3, "a b c", "a b"),
        ("words_max", 2, "a b", "a b c"),
        ("words_max", 2, "a", ""),
        ("bullets", 2, "- a\n* b\n", "-a\n-b"),
        ("upper", True, "ICE, 3!", "ICe"),
        ("lower", True, "ice, 3!", "Ice"),
        ("upper", True, "A", "3!"),
        ("json", ["a"], '{"a": 1, "b": 2}', '{"b": 2}'),
        ("json", True, "[1, 2]", "[1, 2"),
        ("json", True, "{}", "[" * 100_000),
        ("json", True, "9", "9" * 5000),
        ("json", True, "null", "NaN"),
    ],
)
def test_every_check_has_a_text_that_obeys_and_one_that_does_not(name, argument, yes, no):
    assert CHECKS[name](yes, argument)
    assert not CHECKS[name](no, argument)


def test_a_named_check_holds_for_any_target_and_a_table_for_all_of_it():
    assert is_correct("four", "exact", ["4", "four"])
    assert not is_correct("five", "exact", ["4", "four"])
    assert is_correct("a\nb", {"lines": 2, "lacks": "c"}, [])
    assert not is_correct("a\nc", {"lines": 2, "lacks": "c"}, [])


GOOD = {"task": "mine", "kind": "choice"}
ITEM = {"prompt": "p", "choices": [" a", " b"], "answer": 0}


@pytest.mark.parametrize("prompt", ["p", "two lines\n", "def f():\n\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_prompt_may_end_in_a_line_end_and_a_file_begin_with_a_byte_order_mark(tmp_path, prompt, encoding):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**ITEM, 'prompt': prompt})}\n", encoding=encoding)
    assert [item.prompt for item in load_task(str(path)).items] == [prompt]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "found no first line"),
        ([ITEM], "found no first line"),
        ([GOOD], "found only examples"),
        (["nope"], "line 1: not JSON"),
        ([GOOD, [1]], "line 2: found list, expected a JSON object"),
        ([{**GOOD, "shot": 3}, ITEM], "line 1: shot: unknown field; did you mean 'shots'"),
        (
            [GOOD, {**ITEM, "prompt": "Ada found the "}],
            "line 2: found the prompt 'Ada found the ', expected no blank at",
        ),
        ([{**GOOD, "form": "question"}, {**ITEM, "prompt": "Where?\t"}], "line 2: found the prompt 'Where?"),
        ([GOOD, ITEM, {**ITEM, "prompt": "x \u00a0", "example": True}], "line 3: found the prompt"),
        (
            [GOOD, {"prompt": "p", "kind": "generate", "targets": " boat"}],
            "targets: found ' boat', expected a list of texts",
        ),
        ([GOOD, {**ITEM, "choices": "ab"}], "line 2: choices: found 'ab', expected a list of texts"),
        ([GOOD, {**ITEM, "answer": "b"}], "line 2: answer: found 'b', expected a whole number"),
        ([{**GOOD, "stop": "end"}, ITEM], "line 1: stop: found 'end', expected a list of texts"),
        ([GOOD, {**ITEM, "answer": 2}], "line 2: found answer 2, expected the number of a choice from 0"),
        ([GOOD, ITEM, {"prompt": "p", "choices": [" a", " a"], "answer": 0}], "line 3: found choices"),
        (
            [GOOD, {**ITEM, "choices": ["a", " b"]}],
            "line 2: found the choice 'a' after 'p', expected its leading space",
        ),
        ([GOOD, {**ITEM, "prompt": "Answer:", "choices": [" A", "B"]}], "found the choice 'B' after 'Answer:'"),
        ([GOOD, {**ITEM, "prompt": "in 19", "choices": ["1", "2"]}], "found the choice '1' after 'in 19'"),
        ([GOOD, {**ITEM, "choices": ["a", " "]}], "line 2: found an empty choice"),
        ([GOOD, {"choices": ["a", "b"], "answer": 0}], "line 2: prompt: missing; add it"),
        ([GOOD, {"prompt": "p", "kind": "generate"}], "line 2: found check 'exact' without targets"),
        ([GOOD, {"prompt": "p", "kind": "generate", "check": {"line": 1}}], "line 2: found check 'line'; did you mean"),
        ([GOOD, {"prompt": "p", "kind": "generate", "check": {}}], "line 2: found an empty check"),
        ([GOOD, {"prompt": "p", "kind": "generate", "targets": [" "]}], "line 2: found an empty target"),
        ([GOOD, {"prompt": "p", "kind": "code"}], "line 2: found no tests"),
        *(
            (
                [GOOD, {"prompt": prompt, "kind": "code", "tests": "1"}],
                f"line 2: found a definition of '{name}', a builtin",
            )
            for prompt, name in (
                ("def sum(a):\n", "sum"),
                ("x = 1\n\nasync def input():\n", "input"),
                ("class list:", "list"),
            )
        ),
        ([GOOD, {"prompt": "p", "kind": "code", "tests": "assert ("}], "line 2: tests are not Python"),
        ([{**GOOD, "shots": 2}, ITEM, {**ITEM, "example": True}], "found 1 examples for 2 shots"),
        (
            [GOOD, ITEM, {"prompt": "p", "kind": "code", "tests": "1", "example": True}],
            "the example 'p' has no targets",
        ),
    ],
)
def test_a_bad_task_file_is_one_sentence_with_its_line(tmp_path, lines, sentence):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(UserError) as caught:
        load_task(str(path))
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_tasks_and_missing_files():
    with pytest.raises(UserError, match="tasks: no task 'icl-cop'; did you mean 'icl-copy'"):
        load_task("icl-cop")
    with pytest.raises(UserError, match=r"tasks: 'no\.jsonl' does not exist"):
        load_task("no.jsonl")


def test_defaults_of_the_first_line_and_examples(tmp_path):
    path = tmp_path / "mine.jsonl"
    items = [
        {"prompt": "1+1=", "targets": ["2"], "example": True},
        {"prompt": "2+2=", "targets": ["4"]},
        {"prompt": "say yes", "targets": ["yes"], "check": "starts"},
    ]
    head = {"task": "sums", "shots": 1, "check": "number"}
    path.write_text("\n".join(map(json.dumps, [head, *items])))
    task = load_task(str(path))
    assert [item.check for item in task.items] == ["number", "starts"]
    assert [e.prompt + e.reference for e in task.few_shot_examples()] == ["1+1=2"]
    assert task.few_shot_examples(0) == []


def test_F4_the_suite_covers_the_five_abilities():
    tasks = {name: load_task(name) for name in SHIPPED}
    about = " ".join(task.head.ability for task in tasks.values())
    for ability in ("in-context learning", "chain of thought", "instruction following", "code that runs", "languages"):
        assert ability in about
    for name, task in tasks.items():
        assert task.head.task == name == task_file(name).stem
        assert 20 <= len(task.items) <= 60
        prompts = [item.prompt + "".join(item.choices) for item in task.items]
        assert len(set(prompts)) == len(prompts), name


@pytest.mark.parametrize("name", ["icl-copy", "icl-map", "languages"])
def test_F4_the_place_of_the_right_choice_tells_nothing(name):
    items = load_task(name).items
    for place in range(4):
        assert sum(item.answer == place for item in items) <= 0.45 * len(items)


def test_F4_what_examples_and_references_say_is_right():
    for name in SHIPPED:
        task = load_task(name)
        for item in (*task.items, *task.examples):
            if item.kind == "generate" and item.targets:
                assert is_correct(item.reference, item.check, item.targets), item.prompt
                assert not is_correct("", item.check, item.targets)


OBEYED = [
    "apple\npear\nplum",
    "cat\ndog\ncow\nhen",
    "hello there",
    "it is wide and blue",
    "high and white",
    "rain " * 20,
    "BREAD IS GOOD.",
    "snow is white.",
    "it grows in every meadow",
    "it is wide and clear",
    "a stone in the river",
    "one lamp lights the street at night",
    "Yes.",
    "no",
    "7",
    "8",
    "- red\n- green\n- blue",
    "- Rome\n- Oslo\n- Lima\n- Cairo\n- Delhi",
    '{"name": "Ada", "age": 36}',
    "[1, 2, 3]",
    "I like tea, that is all",
    "Certainly, I can.",
    "I love tea!",
    "How was your day?",
    "What is ice?\nFrozen water.",
    "moon moon moon moon",
    "a,b,c,d",
    "1\n2\n3\n4\n5",
    'He said "secret" twice.',
    "A short line.",
    "Cold wind blows.\nThe cold stays.",
    "Cold.",
]


def test_F4_instructions_can_be_followed_and_nonsense_does_not_follow_them():
    items = load_task("follow-instructions").items
    assert [is_correct(text, item.check, item.targets) for item, text in zip(items, OBEYED, strict=True)] == [True] * 32
    for nonsense in ("", "blue Green Z " * 3, "the\nthe"):
        assert sum(is_correct(nonsense, item.check, item.targets) for item in items) <= 5  # some ask for little


def test_numbers_and_ends_are_compared_as_they_are_written() -> None:
    assert is_correct("It is 1,000.", "number", ["1,000"])
    assert is_correct("in 2020-2021", "number", ["2021"])
    assert is_correct("it is -5", "number", ["-5"])
    assert is_correct(" Rome, of course", "starts", [" Rome"])
    assert is_correct("The city is Rome", "ends", [" Rome "])


@pytest.mark.parametrize(
    ("check", "targets"),
    [("words_max", ["3"]), ("lines", ["3"]), ({"matches": "("}, []), ("number", ["many"]), ({"words": "3"}, [])],
)
def test_a_check_that_could_not_be_made_is_refused_when_a_task_is_read(check: Any, targets: list[str]) -> None:
    with pytest.raises(ValueError, match=r"found .*expected"):
        Item.model_validate({"prompt": "p", "kind": "generate", "check": check, "targets": targets})
