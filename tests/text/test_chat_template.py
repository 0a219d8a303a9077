from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import edit_json, save_tiny_tokenizer
from tiny_vllm.errors import RequestError
from tiny_vllm.text.chat_template import ChatTemplate
from tiny_vllm.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be first') }}
    {%- elif message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
    {{- message.role + ':' + message.content + '\n' }}
{%- endfor %}
"""
PARTS = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options)


def test_messages_are_rendered_with_special_tokens_and_generation_prompt() -> None:
    assert template(PLAIN).render([USER]) == "<s><user>hi<assistant>"
    assert template(PLAIN).render([USER], add_generation_prompt=False) == "<s><user>hi"


def test_the_templates_own_words_reach_the_client() -> None:
    messages = [USER, {"role": "system", "content": "late"}]
    with pytest.raises(RequestError, match="System message must be first"):
        template(STRICT).render(messages)
    with pytest.raises(RequestError, match="Unexpected role tool"):
        template(STRICT).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "must be a list"),
        ("hi", "must be a list"),
        (5, "must be a list"),
        (USER, "must be a list"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is of type string, but must be an object"),
        ([None], r"messages\[0\] is of type null"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([USER, {}], r"messages\[1\] has no role"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\] has a role of type number, but must have a string"),
        ([{"role": "", "content": "hi"}], r"messages\[0\] has role '', but needs one"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is of type number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": {"a": None}}]}], "part of type object"),
        ([{"role": "user", "content": [{}]}], "a part without a type"),
        ([{"role": "user", "content": ["hi"]}], "holds something of type string"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text part without text"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        template(PLAIN).render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' + messages[0].x }}", "can only concatenate string"),
        ("{{ messages[0].tool_calls[0] + 'a' }}", "for +: 'object' and 'string'"),
        ("{% for x in messages[0].tool_calls[0].id %}{% endfor %}", "'null' object is not iterable"),
        ("{{ messages[0].tool_calls[0].a.b }}", "'object' has no attribute 'a'"),
        ("{{ messages[0].tool_calls[0].id.a.b }}", "'null' has no attribute 'a'"),
    ],
)
def test_what_a_template_trips_over_is_told_in_words_of_json(source: str, message: str) -> None:
    call = {"role": "user", "content": None, "x": 5, "tool_calls": [{"id": None}]}
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        template(source + "{# tool_calls #}").render([call])
    assert not re.search(r"NoneType|dict|\bstr\b|\bint\b|None", error.value.message)


def test_a_templates_own_words_reach_no_terminal_as_they_are() -> None:
    for source in (
        "{{ raise_exception('\x1b[2J\n' ~ 'x' * 10000) }}",
        "{% \x1b[2J %}",
        "{{ '\x1b[2J' + 5 }}",
    ):
        with pytest.raises(RequestError) as error:
            template(source).render([USER])
        assert error.value.message.isprintable() and len(error.value.message) < 1000


def test_text_parts_are_joined_for_templates_of_plain_text() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(PLAIN).render([{"role": "user", "content": content}]) == "<s><user>ab<assistant>"
    assert template(STRICT).render([{"role": "user", "content": content}]) == "user:ab\n"


def test_text_parts_are_passed_to_templates_that_read_them() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(PARTS).render([{"role": "user", "content": content}, USER]) == "[a][b]hi"


def test_null_in_a_message_is_an_absent_key_for_the_template() -> None:
    """As for transformers: OpenAI's clients send back all fields of an answer, and templates write None."""
    source = (
        "{% for message in messages %}{{ message.content }}|{{ 'name' in message }}|{{ message.tool_calls }}"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "name": None, "tool_calls": [1]}
    assert template(source).render([call]) == "|False|[1]"
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
    assert template(source).render([answer]) == "hi|False|"
    assert template("{{ messages }}").render([answer]) == "[{'role': 'assistant', 'content': 'hi'}]"


def test_an_assistant_message_may_carry_only_tool_calls() -> None:
    source = "{% for message in messages %}{{ message.tool_calls[0].function.name }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert template(source).render([call]) == "add"


CALLED = (
    "{% for message in messages %}{% for call in message.tool_calls %}"
    "{{ call.function.name }} WRITTEN{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ("{{ call.function.arguments | tojson }}", '{"a": 1}'),
        ("{{ call.function | tojson }}", '{"name": "add", "arguments": {"a": 1}}'),
        ("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", "a=1"),
        # Such templates get the client's own text.
        ("{{ call.function.arguments }}", '{"a":1}'),
        ("{{ 'json ' + call.function.arguments }}", 'json {"a":1}'),
        (
            "{% if call.function.arguments is string %}{{ call.function.arguments }}"
            "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
            '{"a":1}',
        ),
    ],
)
def test_arguments_of_calls_are_read_for_templates_that_take_objects(written: str, rendered: str) -> None:
    """OpenAI's clients send them as a text, most templates write an object."""
    chat = template(CALLED.replace("WRITTEN", written))
    function = {"name": "add", "arguments": '{"a":1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    assert chat.render(chat.read_arguments([USER, call])) == f"add {rendered}"
    assert function["arguments"] == '{"a":1}'


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "\x00", 3, None, {"a": 2}, "[" * 100_000, "1" * 5000])
def test_arguments_that_are_no_object_stay_what_they_are(arguments: Any) -> None:
    chat = template(CALLED.replace("WRITTEN", "{{ call.function.arguments | tojson }}"))
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert chat.read_arguments(messages) == messages


@pytest.mark.parametrize(
    "messages",
    [None, "hi", [3], [{"tool_calls": 3}], [{"tool_calls": [3]}], [{"tool_calls": [{"function": 3}]}]],
)
def test_malformed_calls_are_left_to_the_template(messages: Any) -> None:
    assert template(CALLED.replace("WRITTEN", "x")).read_arguments(messages) == messages


def test_a_call_without_arguments_may_have_an_empty_text() -> None:
    chat = template(CALLED.replace("WRITTEN", "{{ call.function.arguments | tojson }}"))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]}
    assert chat.render(chat.read_arguments([call])) == "now {}"


def test_tools_are_written_as_json_without_html_escapes() -> None:
    source = "{% if tools %}{{ tools | tojson }}{% endif %}"
    tools = [{"name": "größer", "description": "a < b & 'c'"}]
    assert template(source).render([USER], tools=tools) == (
        """[{"name": "größer", "description": "a < b & 'c'"}]"""
    )
    assert template("{{ tools | tojson(indent=1) }}").render([USER], tools=[1]) == "[\n 1\n]"  # type: ignore[list-item]
    assert template(source).render([USER]) == ""


def test_tools_choose_their_own_template() -> None:
    both = template("plain", tool_source="with {{ tools | length }} tool")
    assert both.render([USER]) == "plain"
    assert both.render([USER], tools=[{}]) == "with 1 tool"
    with pytest.raises(RequestError, match="tools is of type string"):
        both.render([USER], tools="add")  # type: ignore[arg-type]


def test_tools_that_would_not_reach_the_prompt_are_refused() -> None:
    with pytest.raises(RequestError, match="takes no tools"):
        template(PLAIN).render([USER], tools=[{"name": "add"}])
    assert template(PLAIN).render([USER], tools=[]) == template(PLAIN).render([USER])


def test_loop_controls_dates_and_variables_work() -> None:
    source = "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert template(source).render([USER]) == "1"
    assert re.fullmatch(r"\d{4}-\d\d", template("{{ strftime_now('%Y-%m') }}").render([USER]))
    assert template("{{ mood }}").render([USER], variables={"mood": "calm"}) == "calm"


GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<assistant>' }}{% generation %}{{- message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% generation %}
  {%- set inside = 'x' %}{% endgeneration %}{{ inside }}{% endif %}
"""
"""As templates for training mark what the model says."""


def test_blocks_that_mark_what_the_model_says_are_text_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    messages = [USER, {"role": "assistant", "content": "ho"}, USER]
    rendered = template(GENERATION).render(messages)
    assert rendered == "<user>hi<assistant>ho</s><user>hi<assistant>"
    save_tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token="</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert rendered == theirs.apply_chat_template(
        messages, chat_template=GENERATION, tokenize=False, add_generation_prompt=True
    )
    with pytest.raises(RequestError, match="not valid Jinja: line 1: Unexpected end of template"):
        template("{% generation %}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    message = dict(USER)
    with pytest.raises(RequestError):
        template(source).render([message])
    assert message == USER


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**18 }}",
    ],
)
def test_a_template_that_trips_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template"):
        template(source).render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages | no_such_filter }}"])
def test_a_template_that_is_not_jinja_refuses_conversations_only(source: str) -> None:
    broken = template(source)
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        with pytest.raises(RequestError, match=r"is not valid Jinja: line 1: .*\nhint: repair"):
            broken.render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "it is nested too deeply"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "too many statically nested blocks"),
        ("{% break %}", "'break' outside loop"),
        ("{{ " + "1" * 5000 + " }}", "4300 digits"),
    ],
)
def test_a_template_that_cannot_be_compiled_refuses_conversations_only(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"cannot be compiled: .*{reason}.*\nhint: repair"):
        template(source).render([USER])


def test_a_broken_tool_template_refuses_conversations() -> None:
    with pytest.raises(RequestError, match="not valid Jinja"):
        template(PLAIN, tool_source="{% for %}").render([USER])


def test_the_bundled_template_renders_as_transformers_does(bundled_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    assert bundled_tokenizer.chat_template is not None
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer._backend)
    reference.chat_template = bundled_tokenizer.chat_template.source
    conversations = [
        [USER],
        [{"role": "system", "content": "Be <b>brief</b> & kind."}, USER],
        [USER, {"role": "assistant", "content": "hello  "}, {"role": "user", "content": "\nbye\n"}],
    ]
    for messages in conversations:
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            rendered = bundled_tokenizer.chat_template.render(messages, add_generation_prompt=prompt)
            assert rendered == expected
            ids = reference.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False, tokenize=True
            )
            assert bundled_tokenizer.encode_chat(rendered) == ids
