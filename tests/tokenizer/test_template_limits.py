"""A template is foreign code: what it does for one conversation is bounded, alike on every machine."""

import pytest

from ingot.core.errors import UserError
from ingot.tokenizer import template_sandbox
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.chat import check_turn_end, render
from ingot.tokenizer.hf_files import TURNS_JINJA
from ingot.tokenizer.template_sandbox import TemplateLimit

TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "the end"}]
LONG = "{% set x = 'ab' * 400000 %}"
LISTS = "{% set n = namespace(x=['a']) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
PAIR = LISTS + "{% set n.y = ['a'] %}{% for a in range(99) %}{% set n.y = [n.y, n.y] %}{% endfor %}"
LOOPS = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}"
    ),
    "a recursive loop": (
        "{% for a in [1, 2, 3] recursive %}{% if loop.depth < 99 %}{{ loop([1, 2, 3]) }}{% endif %}{% endfor %}"
    ),
    "a filter over a range, often": "{% for a in range(9999) %}{{ range(9999) | map('abs') | sum }}{% endfor %}",
    "a long text searched often": LONG + "{% for a in range(99999) %}{% if 'ba' in x %}{% endif %}{% endfor %}",
    "a long text sliced often": LONG + "{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "a long text trimmed often": LONG + "{% for a in range(99999) %}{% set y = x | trim %}{% endfor %}",
    "a long text changed often": LONG + "{% for a in range(99999) %}{% set y = x.upper() %}{% endfor %}",
}
SIZES = {
    "doubled with +": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled with ~": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by a block": (
        "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}"
    ),
    "doubled lists": LISTS + "{{ n.x }}",
    "doubled lists compared": PAIR + "{{ n.x == n.y }}",
    "doubled lists ordered": PAIR + "{{ n.x < n.y }}",
    "doubled lists searched": PAIR + "{{ n.x in [n.y] }}",
    "doubled lists compared by a test": PAIR + "{{ n.x is eq n.y }}",
    "doubled lists selected": PAIR + "{{ [n.x] | select('equalto', n.y) | list }}",
    "doubled tuples as a key": (
        "{% set n = namespace(x=(1,)) %}{% for a in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}"
    ),
    "doubled lists as JSON": LISTS + "{{ n.x | tojson }}",
    "doubled lists joined to a text": LISTS + "{{ 'x' ~ n.x }}",
    "*": "{{ 'x' * 99999999999 }}",
    "* of a list": "{{ ([1] * 99999999) | length }}",
    "**": "{{ 9 ** (9 ** 9) }}",
    "%": "{{ '%99999999999d' % 1 }}",
    "% of a huge width": "{{ '%*d' % (9999999999, 1) }}",
    "% of a width": "{{ '%*d' % (99999999, 1) }}",
    "format": "{{ '{:99999999d}'.format(1) }}",
    "format of a width": "{{ '{:{}d}'.format(1, 99999999) }}",
    "center": "{{ 'x' | center(99999999) }}",
    "a method's width": "{{ 'x'.zfill(99999999) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "join": "{{ ('b' * 9999).join(['a'] * 9999) }}",
    "join as a filter": "{{ (['a'] * 9999) | join('b' * 9999) }}",
    "indent": "{{ ('a\n' * 9999) | indent(9999) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(9999) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "output": "{% set x = 'x' * 90000 %}{{ x }}{{ x }}",
}


def using(bpe: ByteBPE, source: str) -> ByteBPE:
    return ByteBPE(bpe.tokens, bpe.pattern, source + TURNS_JINJA)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_works_without_end_is_refused(bpe, few_steps, name):
    with pytest.raises(TemplateLimit, match=r"more than [\d,]+ steps for one conversation") as caught:
        render(TALK, using(bpe, LOOPS[name]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_a_template_that_makes_long_texts_is_refused(bpe, monkeypatch, name):
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 100_000)
    with pytest.raises(TemplateLimit, match=r"(a value|an integer) of more than") as caught:
        render(TALK, using(bpe, SIZES[name]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000]
)
def test_a_template_that_is_nested_too_deeply_is_one_sentence(bpe, source):
    with pytest.raises(UserError, match="chat template: it is nested too deeply to compile; fix the template"):
        render(TALK, using(bpe, source))


def test_the_limit_is_counted_and_not_timed(bpe, few_steps):
    """The same loop passes or fails by its length alone; each message adds to the limit."""
    source = "{% for a in range(N) %}{% for b in range(10) %}{% endfor %}{% endfor %}"
    render(TALK, using(bpe, source.replace("N", "3000")))  # 12 steps each: a call and eleven iterations
    with pytest.raises(TemplateLimit, match="more than 40,024 steps"):  # two messages of 24 characters with their roles
        render(TALK, using(bpe, source.replace("N", "4000")))
    render(TALK * 2, using(bpe, source.replace("N", "4000")))


def test_a_template_that_always_fails_its_limit_is_an_error_before_any_conversation(bpe, few_steps):
    with pytest.raises(TemplateLimit):
        check_turn_end(using(bpe, LOOPS["loops in loops"]))
    check_turn_end(using(bpe, "{{ raise_exception('only with tools') if not tools }}"))


def test_long_conversations_are_no_endless_ones(bpe):
    """600 messages whose template looks at all of them for each, and one message of a megabyte."""
    source = "{% for m in messages %}{% if messages | length > 1 and messages[loop.index0:] %}{% endif %}{% endfor %}"
    _, mask = render(TALK * 300, using(bpe, source))
    assert mask.sum() == 300 * (len(bpe.encode("the end")) + 1)
    long = [{"role": "user", "content": "word " * 200_000}, TALK[1]]
    source = (
        "{% for m in messages %}{% set x = m.content.strip().replace('w', 'W').split('x')[-1] | trim %}{% endfor %}"
    )
    assert len(render(long, using(bpe, source))[0]) > 200_000


def test_nothing_depends_on_chance(bpe):
    with pytest.raises(UserError, match="No filter named 'random'"):
        render(TALK, using(bpe, "{{ [1, 2, 3] | random }}"))
    with pytest.raises(UserError, match="'lipsum' is undefined"):
        render(TALK, using(bpe, "{{ lipsum() }}"))


def test_loops_keep_what_jinja_says_of_them(bpe):
    source = (
        "{% for a in [3, 1, 2] if a != 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ a }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}"
        "{% for x in missing %}{% else %}none{% endfor %}"
        "{% for a in 'abc' %}{% if loop.index == 2 %}{% break %}{% endif %}{{ a }}{{ loop.nextitem }}{% endfor %}"
    )
    text = bpe.decode(render(TALK, using(bpe, source))[0])
    assert text.startswith("1/2False32/2True2a1Nonenoneab<|user|>")
