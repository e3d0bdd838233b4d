"""Chat templates: what transformers renders, what is refused and how, and what a hostile template cannot do."""

import contextlib
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.chat_template import ChatTemplate, check_messages, read_chat_template
from jaxpaged.errors import ChatTemplateError, ConfigError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As in SmolLM2-135M-Instruct (test_smollm2.py compares it with the file's own)."""

DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


# What transformers 5.24's apply_chat_template gave for SmolLM2 without the generation prompt.
RENDERED = [
    ([user("Hi")], DEFAULT_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n"),
    ([system("Be brief."), user("Hi")], "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
    (
        [user("Hi"), assistant("Hello!"), user("Bye")],
        DEFAULT_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n",
    ),
    (
        [system("Be brief."), user("What is 2 + 2?"), assistant("4"), user("And 3 + 3?")],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n",
    ),
    ([user("  spaces  ")], DEFAULT_SYSTEM + "<|im_start|>user\n  spaces  <|im_end|>\n"),
    ([user("")], DEFAULT_SYSTEM + "<|im_start|>user\n<|im_end|>\n"),
    ([user("line\nbreak\n")], DEFAULT_SYSTEM + "<|im_start|>user\nline\nbreak\n<|im_end|>\n"),
    ([assistant("I begin.")], DEFAULT_SYSTEM + "<|im_start|>assistant\nI begin.<|im_end|>\n"),
    ([user("a"), user("b")], DEFAULT_SYSTEM + "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"),
    ([user("q"), system("Be brief.")], DEFAULT_SYSTEM + "<|im_start|>user\nq<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"),
    ([system("Be brief.")], "<|im_start|>system\nBe brief.<|im_end|>\n"),
    ([user("東京 🧑🏽‍🚀")], DEFAULT_SYSTEM + "<|im_start|>user\n東京 🧑🏽‍🚀<|im_end|>\n"),
    ([{"role": "tool", "content": '{"k": 1}'}], DEFAULT_SYSTEM + '<|im_start|>tool\n{"k": 1}<|im_end|>\n'),
    (
        [user("<b>&amp;</b> {{ x }} {% y %}")],
        DEFAULT_SYSTEM + "<|im_start|>user\n<b>&amp;</b> {{ x }} {% y %}<|im_end|>\n",
    ),
]


@pytest.mark.parametrize("messages, want", RENDERED)
def test_smollm2_conversations_as_transformers_renders_them(messages: list[dict[str, Any]], want: str) -> None:
    template = ChatTemplate(SMOLLM2, "<|im_start|>", "<|im_end|>")
    assert template.render(messages, add_generation_prompt=False) == want
    assert template.render(messages, add_generation_prompt=True) == want + OPENING


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render(messages or [user("hi")], add_generation_prompt=True, **variables)


@pytest.mark.parametrize(
    "source, want",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        (
            "{% for m in [1, 2, 3, 4] %}{% if m == 2 %}{% continue %}{% endif %}{% if m == 4 %}{% break %}{% endif %}{{ m }}{% endfor %}",
            "13",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ '<é&\"' | tojson }}", '"<é&\\""'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ dict(a=1)['a'] }}{{ dict.fromkeys(['x'], 2)['x'] }}", "12"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ tools is none }} {{ tools is defined }} {{ documents is none }} {{ unknown is defined }}", "True True True False"),
        ("{{ messages[0].content.split('i')[0].upper() }}", "H"),
        ("{{ raise_exception is callable }}", "True"),
    ],
)
def test_what_templates_may_use(source: str, want: str) -> None:
    assert render(source) == want


def test_variables_of_the_request_reach_the_template() -> None:
    assert render("{{ enable_thinking }} {{ tools[0].name }}", enable_thinking=False, tools=[{"name": "f"}]) == "False f"


def test_today_is_known() -> None:
    before = datetime.now().strftime("%d %B %Y")
    shown = render("{{ strftime_now('%d %B %Y') }}")
    assert shown in (before, datetime.now().strftime("%d %B %Y"))


def test_a_token_that_the_model_has_not_is_undefined() -> None:
    template = ChatTemplate("{{ bos_token is defined }} {{ eos_token }}", None, "</s>")
    assert template.render([user("")], add_generation_prompt=True) == "False </s>"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "eos_token"])
def test_the_templates_own_variables_cannot_be_replaced(name: str) -> None:
    template = ChatTemplate("{{ messages }}")
    if name in ("messages", "add_generation_prompt"):
        # These are parameters of `render`: Python itself lets nobody give them twice.
        with pytest.raises(TypeError):
            template.render([user("")], add_generation_prompt=True, **{name: "x"})
    else:
        with pytest.raises(ChatTemplateError, match=name):
            template.render([user("")], add_generation_prompt=True, **{name: "x"})


def test_a_refusal_of_the_template_is_passed_on() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match=r"^no system turn, please$") as caught:
        render(source, [system("x"), user("y")])
    assert (caught.value.http_status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
        "{{ missing.attribute }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ messages[0] | nosuchattr | int }}".replace("nosuchattr", "int") + "{{ missing() }}",
    ],
)
def test_a_template_that_fails_is_a_refusal_in_one_sentence(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"^the chat template cannot show these messages: .+$") as caught:
        render(source)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for %}{% endfor %}", "{{ x | nosuchfilter }}"])
def test_a_wrong_syntax_is_told_when_compiling(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled") as caught:
        ChatTemplate(source)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ 'x' | attr('__class__') }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    """Jinja's sandbox refuses, or gives an undefined value that prints nothing."""
    shown = ""
    with contextlib.suppress(ChatTemplateError):
        shown = render(source)
    assert shown == ""


def test_rendering_changes_no_message() -> None:
    messages = [user([{"type": "text", "text": "a"}]), assistant("b")]
    before = repr(messages)
    template = ChatTemplate(SMOLLM2)
    template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert repr(messages) == before


def test_templates_see_plain_data_only() -> None:
    """A subclass of str with a method of its own is a plain string to the template."""

    class Sly(str):
        __slots__ = ()

        def secret(self) -> str:
            return "seen"

    with pytest.raises(ChatTemplateError, match="cannot show"):
        render("{{ messages[0].content.secret() }}", [user(Sly("x"))])
    with pytest.raises(ChatTemplateError, match="got PosixPath"):
        render("{{ messages[0].content }}", [{**user("x"), "extra": Path("/")}])


@pytest.mark.parametrize(
    "content, want",
    [
        ("One.", "One."),
        ([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], "One.\nTwo."),
        ([{"text": "One."}], "One."),
        (["One.", "Two."], "One.\nTwo."),
        (({"type": "text", "text": "One."},), "One."),
        ([], ""),
        ("", ""),
    ],
)
def test_text_parts_are_joined_by_newlines(content: Any, want: str) -> None:
    """O-07."""
    assert check_messages([user(content)]) == [user(want)]
    assert render("{{ messages[0].content }}", [user(content)]) == want


@pytest.mark.parametrize(
    "messages, named",
    [
        ([], "at least one message"),
        ("hi", "list"),
        (user("hi"), "list"),
        (None, "list"),
        ([user("a"), "b"], r"messages\[1\].*got str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "", "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([user("a"), user(None)], r"messages\[1\] \(role 'user'\) has no content"),
        ([{"role": "assistant"}], r"messages\[0\] \(role 'assistant'\) has no content"),
        ([{"role": "assistant", "tool_calls": []}], "has no content"),
        ([user(5)], r"messages\[0\].content.*got int"),
        ([user({"type": "text", "text": "x"})], r"messages\[0\].content.*got dict"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], r"messages\[0\].content\[0\].*'image_url'"),
        ([user([{"type": "text", "text": "x"}, {"type": "odd", "text": "y"}])], r"content\[1\].*'odd'"),
        ([user([{"type": "text", "text": None}])], r"content\[0\].*'text'"),
        ([user([7])], r"content\[0\].*int"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, named: str) -> None:
    template = ChatTemplate(SMOLLM2)
    with pytest.raises(ChatTemplateError, match=named) as caught:
        template.render(messages, add_generation_prompt=True)
    assert caught.value.http_status == 400


@pytest.mark.parametrize("depth", [70, 5000])
def test_messages_nested_without_end_are_refused(depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="64 deep"):
        check_messages([{**user("x"), "extra": nested}])
    with pytest.raises(ChatTemplateError, match="64 deep"):
        render("x", tools=nested)


def test_content_may_be_absent_beside_tool_calls() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"k": 2}}}]
    messages: list[Mapping[str, Any]] = [user("q"), {"role": "assistant", "content": None, "tool_calls": calls, "name": None}]
    assert check_messages(messages)[1] == {"role": "assistant", "tool_calls": calls}
    source = "{% for m in messages %}{{ m.content if m.content else m.tool_calls[0].function.arguments.k }};{% endfor %}"
    assert ChatTemplate(source).render(messages, add_generation_prompt=True) == "q;2;"
    with pytest.raises(ChatTemplateError, match="has no attribute 'content'"):
        ChatTemplate(SMOLLM2).render(messages, add_generation_prompt=True)


TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"


@pytest.mark.parametrize("source, opening", [(TRIMMING, "[user]a[end][assistant]"), (SMOLLM2, None)])
@pytest.mark.parametrize("prefix", ["Sure:", "Sure:\n", "Sure: ", "Sure:\t", "", "é\n\n"])
def test_the_last_message_is_continued_as_given(source: str, opening: str | None, prefix: str) -> None:
    """O-09: the prefix keeps its white space and no end of turn follows. (transformers cuts the white space with a trimming template.)"""
    messages = [user("a"), assistant(prefix)]
    opening = DEFAULT_SYSTEM + "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" if opening is None else opening
    text = ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == opening + prefix


def test_a_message_that_cannot_be_continued() -> None:
    hiding = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="does not show the last message"):
        hiding.render([user("a"), assistant("b")], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="cannot both be true") as caught:
        hiding.render([user("a")], add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ChatTemplateError, match="no content to continue"):
        hiding.render([user("a"), calls], add_generation_prompt=False, continue_final_message=True)


def test_threads_share_a_template() -> None:
    template = ChatTemplate(SMOLLM2)
    wrong: list[str] = []

    def work(name: str) -> None:
        want = f"{DEFAULT_SYSTEM}<|im_start|>user\n{name}<|im_end|>\n{OPENING}"
        wrong.extend(text for _ in range(50) if (text := template.render([user(name)], add_generation_prompt=True)) != want)

    threads = [threading.Thread(target=work, args=(f"name {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_option_is_a_file_or_a_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_chat_template(str(path)) == "{{ 'é' }}"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="nowhere.jinja") as caught:
        read_chat_template(str(tmp_path / "nowhere.jinja"))
    assert caught.value.param == "chat_template"
