"""Hostile chat templates: what costs memory is refused before it is done, what costs time is stopped."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.chat_template import ChatTemplate
from jaxpaged.errors import ChatTemplateError
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.template_sizes import MAX_CHARS
from jaxpaged.time_limit import RETRY_S, TimeUpError, run_within
from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_backend, save_folder

MESSAGES = [{"role": "user", "content": "hi"}]
MEMORY_BYTES = 200_000_000
DOUBLE = "{{% set n = namespace(x='xxxxxxxxxxxxxxxx') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ n.x|length }}}}"


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """What other tests have left is not looked through for each of the many here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Hypothesis has Python code called by it, and an exception that comes out there is reported and not raised."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def render(source: str, timeout_s: float = 20.0) -> str:
    return ChatTemplate(source, timeout_s=timeout_s).render(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{% set many = messages * 10**9 %}",
        "{{ 'x'|center(10**9) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.rjust(10**9) }}",
        "{{ '1'.zfill(10**9) }}",
        "{{ ('\t' * 1000).expandtabs(10**6) }}",
        "{{ ('\n' * 10**6)|indent(10**4) }}",
        "{{ ('x\n' * 10**6)|indent('y' * 200) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ 'x'|replace('x', 'y' * 10**6)|replace('y', 'z' * 10**6) }}",
        "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
        "{{ ('x' * 10**6).replace('', 'y' * 10**6) }}",
        "{{ (['x'] * 10**5)|join('y' * 1000) }}",
        "{{ ('y' * 1000).join(['x'] * 10**5) }}",
        "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%0999999999d'|format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ '{x:>{y}}'.format_map({'x': 1, 'y': 10**9}) }}",
        "{{ ('{0}' * 10**6).format('x' * 10**4) }}",
        "{{ ('%0999d' * 99999) % 1 }}",
        "{{ '%(a)0999999999d' % {'a': 1} }}",
        "{{ '{0:{w}}'.format(1, w=10**9) }}",
        "{{ 10 ** 9999 }}",
        "{{ 2 ** 99999999 }}",
        "{{ range(10**9)|list }}",
        DOUBLE.format("{% set n.x = n.x + n.x %}"),
        DOUBLE.format("{% set n.x = n.x ~ n.x %}"),
        DOUBLE.format("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        DOUBLE.format("{% set n.x = [n.x, n.x]|join %}"),
        DOUBLE.format("{% set n.x = n.x|replace('x', 'xx') %}"),
        DOUBLE.format("{% set n.x = '%s%s' % (n.x, n.x) %}"),
        DOUBLE.format("{% set n.x = '{0}{0}'.format(n.x) %}"),
        DOUBLE.format("{% set n.x = n.x * 2 %}"),
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x|length }}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.format("{% set n.x = m(n.x) %}"),
        "{% for i in range(1000) %}{{ 'x' * 10**6 }}{% endfor %}",
        # Few characters in memory, and many once they are written out.
        *(
            f"{{% set many = ['x' * 10**7] * 120 %}}{{% set n = namespace(x=many, y=many) %}}{{{{ {written} }}}}"
            for written in (
                *("many", "many ~ ''", "{'a': many}", "n", "n ~ n", "{'a': many}.values()", "{'a': many}.items()", "dict(a=many)"),
                *("many|tojson", "many|string", "many|pprint", "many|e", "many|upper", "many|trim", "many|wordwrap", "many|urlencode"),
                *(
                    "many|safe",
                    "many|replace('y', 'z')",
                    "many|indent",
                    "many|center(5)",
                    "[many]|join",
                    "'-'.join(many)",
                    "many|join('x')",
                ),
                *("'%s' % [many]", "'%s'|format(many)", "'{}'.format(many)", "'{a}'.format_map({'a': many})", "{many|string: 1}"),
                *("many|title", "many|capitalize", "many|truncate", "many|striptags", "many|wordcount", "many|map('string')|list"),
            )
        ),
        "{{ ([[1] * 10**5] * 1000)|sum(start=[])|length }}",
        "{{ ('x' * 12000)|wordwrap(1, true, 'y' * 100000) }}",
        "{{ ([1] * 10**5)|tojson(indent=200) }}",
        "{{ ('я' * 10**7)|list|length }}",
        "{{ ('я ' * 10**7).split()|length }}",
        "{{ ('я-' * 10**7).split('-')|length }}",
        "{{ ('я-' * 10**7).rsplit('-')|length }}",
        "{{ ('я\n' * 10**7).splitlines()|length }}",
        "{{ ('я' * 10**7)|batch(2)|list|length }}",
        "{{ ('я' * 10**7)|sort|length }}",
        "{{ 'x'.encode() * 10**9 }}",
        "{{ (1).to_bytes(10**9) }}",
        # Many values that are each small enough.
        "{% set n = namespace(x=[]) %}{% for i in range(80) %}{% set n.x = n.x + ['x' * 15000000] %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(80) %}{% set n.x = [n.x, 'x' * 15000000] %}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(80) %}{% set n.x = (n.x, 'x' * 15000000) %}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(80) %}{% set n.x = {'a': n.x, 'b': 'x' * 15000000} %}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(80) %}{% set n.x = namespace(a=n.x, b='x' * 15000000) %}{% endfor %}",
        "{% set n = namespace(x={}) %}{% for i in range(80) %}{% set n.x = dict(n.x, **{i|string: 'x' * 15000000}) %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(80) %}{% set n.x = [n.x, [1] * 10**7] %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(800) %}{% set n.x = [n.x, ([1] * 99999)|list] %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(800) %}{% set n.x = [n.x, dict.fromkeys(range(99999))] %}{% endfor %}",
        "{% macro m(k) %}{% set x = [k, k ~ 'x'] %}{{ m(k + 1) }}{{ x }}{% endmacro %}{{ m(0) }}",
        "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    ],
)
def test_a_value_that_is_too_large_is_refused_in_bounded_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match="cannot show these messages"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def test_what_ordinary_templates_do_still_works() -> None:
    assert render("{{ 'ab' * 3 ~ '-' ~ (4 + 5) ~ (['c'] + ['d']) }}") == "ababab-9['c', 'd']"
    assert render("{{ '%s|%5.2f|%03d' % ('x', 1.5, 7) }} {{ '%s' % 'y' }} {{ 7 % 4 }} {{ 2 ** 10 }}") == "x| 1.50|007 y 3 1024"
    assert render("{{ '{:>4}{}'.format('x', 1) }} {{ '{a}'.format_map({'a': 2}) }} {{ '%s!'|format('z') }}") == "   x1 2 z!"
    assert (
        render("{{ 'a\nb'|indent }}{{ 'a\nb'|indent(2, true) }}{{ {'k': [1]}|tojson(indent=1) }}")
        == 'a\n    b  a\n  b{\n "k": [\n  1\n ]\n}'
    )
    assert (
        render("{{ [1, 2]|join(', ') }} {{ '-'.join(['x', 'y']) }} {{ 'x'.ljust(3) }}| {{ 'aXa'|replace('a', 'b') }}")
        == "1, 2 x-y x  | bXb"
    )
    assert (
        render("{{ [3, 4, 5]|batch(2)|list }} {{ [1, 2, 3]|slice(2)|list }} {{ 'x'|center(5) }}|") == "[[3, 4], [5]] [[1, 2], [3]]   x  |"
    )


def test_a_template_that_gathers_messages_is_not_stopped() -> None:
    """Lists and texts that grow by one message at a time, and are counted at each."""
    source = (
        "{% set n = namespace(kept=[], text='') %}{% for message in messages %}{% set n.kept = n.kept + [message] %}"
        "{% set n.text = n.text ~ message['content'] %}{% if loop.index0 == messages|length - 1 %}{{ n.kept|length }}{% endif %}"
        "{% endfor %}{{ n.text|length }} {{ n.kept|tojson|length }}"
    )
    messages = [{"role": "user", "content": "word " * 40}] * 1000
    shown = ChatTemplate(source, timeout_s=60.0).render(messages, add_generation_prompt=False)
    assert shown == f"1000{1000 * 200} {1000 * (200 + len('{"role": "user", "content": ""}, '))}"


def test_what_one_rendering_used_is_not_held_against_the_next() -> None:
    template = ChatTemplate("{% for i in range(3) %}{% set x = [1] * 5000000 %}{% endfor %}{{ [1, (2, 3), {'a': (4,)}] }}")
    for _ in range(3):
        assert template.render(MESSAGES, add_generation_prompt=False) == "[1, (2, 3), {'a': (4,)}]"
    assert render("{% for a, (b, c) in [(1, (2, 3))] %}{% set d, e = c, b %}{{ a }}{{ d }}{{ e }}{% endfor %}") == "132"
    assert (
        render(
            "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{% else %}{{ caller() if caller else 'end' }}{% endif %}{% endmacro %}"
            "{{ m(30) }} {% call m(0) %}x{% endcall %}"
        )
        == "end x"
    )


def test_numbers_in_the_text_of_a_format_are_no_widths() -> None:
    assert render("{{ 'order 1234567890: %s, 50% of 999999%' % 'x' if false else 'order 1234567890: %s' % 'x' }}") == "order 1234567890: x"
    assert render("{{ 'in 1234567 {a}: {0:>3}'.format(1, a='b') }} {{ 'no. 7654321 %s'|format('y') }}") == "in 1234567 b:   1 no. 7654321 y"
    assert render("{{ ('{}' * 400 ~ ' 123').format(*range(400)) | length }}") == str(4 + sum(len(str(i)) for i in range(400)))


def test_a_long_conversation_is_rendered() -> None:
    text = "word " * (MAX_CHARS // 10)
    template = ChatTemplate("{% for message in messages %}{{ '<' + message['content'] + '>' }}{% endfor %}")
    assert len(template.render([{"role": "user", "content": text}], add_generation_prompt=False)) == len(text) + 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ m(40) }}",
        "{% set x = range(99999)|list %}{% for a in range(99999) %}{% set y = x|sort|reverse|list %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped_and_nobody_else_is(source: str) -> None:
    stopped = threading.Event()
    ticks = []

    def tick() -> None:
        while not stopped.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    other = threading.Thread(target=tick)
    other.start()
    begun = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"takes more than 0.3 s"):
        render(source, timeout_s=0.3)
    took_s = time.monotonic() - begun
    stopped.set()
    other.join()
    assert took_s < 20, "it would go on for minutes"
    assert len(ticks) > 3
    assert render("{{ messages|length }}") == "1"


def test_the_limit_ends_with_the_block() -> None:
    """Calls that end just when the time is up return or are stopped, and nothing is raised later."""
    outcomes = set()
    for _ in range(200):
        try:
            outcomes.add(run_within(0.002, lambda: sum(range(60_000)) and "done"))
        except TimeUpError:
            outcomes.add("stopped")
        for _ in range(50):
            len("a place for a late exception to come out")
    assert outcomes <= {"done", "stopped"}
    time.sleep(3 * RETRY_S)


def test_what_swallows_the_exception_is_stopped_all_the_same() -> None:
    def stubborn() -> None:
        for _ in range(3):
            try:
                while True:
                    pass
            except TimeUpError:
                continue

    begun = time.monotonic()
    run_within(0.05, stubborn)
    assert time.monotonic() - begun < 20


def test_errors_and_results_pass_through() -> None:
    assert run_within(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_within(5.0, lambda: 1 // 0)


def test_the_option_reaches_the_template(tmp_path: Path) -> None:
    save_folder(tmp_path, byte_level_backend())
    files = ModelFiles(name="own", kind="folder", path=tmp_path, tokenizer_path=None, cache_path=tmp_path)
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer.from_files(files, chat_template=slow, template_timeout_s=0.05)
    with pytest.raises(ChatTemplateError, match=r"more than 0.05 s"):
        tokenizer.apply_chat_template(MESSAGES)
