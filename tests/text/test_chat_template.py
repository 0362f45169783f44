"""Chat templates: what they may use, and errors that say what is wrong."""

import re
from datetime import datetime

import pytest

from jaxinfer.text import ChatTemplate, ChatTemplateError, render_chat

USER = [{"role": "user", "content": "Hi"}]


def test_blocks_leave_no_white_space():
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}!\n    {% endif %}\n"
        "{% endfor %}\n"
    )
    assert render_chat(source, [*USER, {"role": "user", "content": "x"}]) == "Hi!\nx!\n"


def test_variables():
    source = "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ thinking }}"
    text = render_chat(source, USER, bos_token="<s>", eos_token="</s>", thinking=False)
    assert text == "<s>|</s>|True|False"


def test_tojson_escapes_nothing():
    tools = [{"name": "f<>&'", "description": "größe 🔥", "b": None}]
    assert render_chat("{{ tools | tojson }}", USER, tools=tools) == (
        '[{"name": "f<>&\'", "description": "größe 🔥", "b": null}]'
    )
    indented = render_chat("{{ tools[0] | tojson(indent=2) }}", USER, tools=[{"b": 1, "a": 2}])
    assert indented == '{\n  "b": 1,\n  "a": 2\n}'


def test_tools_that_are_not_given():
    assert render_chat("{% for t in tools %}x{% endfor %}-", USER) == "-"
    assert render_chat("{{ 'yes' if tools is not none else 'no' }}", USER) == "no"
    assert render_chat("{{ 'yes' if tools is defined else 'no' }}", USER) == "no"
    assert render_chat("{% if tools %}yes{% else %}no{% endif %}", USER) == "no"
    assert (
        render_chat("{{ 'yes' if documents is not none else 'no' }}", USER, documents=[]) == "yes"
    )


def test_loop_controls_and_training_marks():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    assert render_chat(source, USER * 3) == "Hi"
    assert (
        render_chat("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", USER)
        == "aHib"
    )


def test_the_clock():
    assert re.fullmatch(r"20\d\d", render_chat("{{ strftime_now('%Y') }}", USER))
    now = datetime(2024, 7, 26).strftime
    assert render_chat("{{ strftime_now('%d %b') }}", USER, strftime_now=now) == "26 Jul"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Only user roles') }}", "Only user roles"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 'a' + messages[0] }}", "concatenate"),
        ("{% for %}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_the_template_refuses(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(source, USER)


def test_a_bad_template_can_be_held():
    assert ChatTemplate("{% for %}").source == "{% for %}"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hi", "non-empty list"),
        ({"role": "user", "content": "Hi"}, "non-empty list"),
        (["Hi"], r"messages\[0\] is a str"),
        ([*USER, {"content": "Hi"}], r"messages\[1\] has role None"),
        ([{"role": "", "content": "Hi"}], r"messages\[0\] has role ''"),
        ([{"role": "user"}], r"messages\[0\] has content of type NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\] has content of type list"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render_chat("x", messages)


def test_tool_calls_need_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render_chat("{{ messages[1].tool_calls[0].function.name }}", [*USER, call]) == "f"
