"""Chat templates: rendered as transformers renders them, and a client's fault is a client's 400."""

from __future__ import annotations

from typing import Any

import pytest

from frontends.text.errors import ApiError
from frontends.text.template import ChatTemplate

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, NAMES).render(HI if messages is None else messages, **options)


def test_blocks_leave_no_lines_behind() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m['content'] }}\n  {% endfor %}\nend"
    assert render(source) == "<s>\nhi\nend"


def test_loops_can_be_left_and_the_date_told() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y') }}"
    text = render(source)
    assert text.startswith("01")
    assert len(text) == 6


def test_the_training_mark_shows_its_content() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!"
    assert render(source) == "hi!"


def test_json_is_not_escaped_for_html() -> None:
    tools = [{"name": "<ü>", "a": 1}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "<ü>", "a": 1}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[{}]) == "[\n {}\n]"
    assert render("{% if tools is none %}none{% endif %}") == "none"


def test_call_arguments_are_objects_where_they_are_json() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    for arguments, shown in (('{"a": 1}', '{"a": 1}'), ("", "{}"), ("{oops", '"{oops"'), ("[" * 100_000, None)):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        text = render(source, [{"role": "assistant", "content": None, "tool_calls": calls}])
        assert shown is None or text == shown


def test_a_developer_is_a_system_for_templates_that_do_not_know_one() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


def test_the_client_s_messages_are_left_as_they_are() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    render("{{ messages[0].content }}", messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 'a' + messages[0].nothing }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' | int(base=99) + nothing }}",
    ],
)
def test_what_a_template_objects_to_is_a_refusal(source: str) -> None:
    with pytest.raises(ApiError) as error:
        render(source)
    assert (error.value.status, error.value.param) == (400, "messages")


def test_a_template_s_own_words_reach_the_client() -> None:
    with pytest.raises(ApiError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("content", ["is", "is ", "is \n", ""])
def test_a_continued_message_ends_the_prompt_even_if_the_template_trims(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    source = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}{{ eos_token }}"
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, messages, **options) == f"<hi><{content}"
    with pytest.raises(ApiError) as error:
        render("{{ bos_token }}", messages, **options)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_template_names_that_are_ours_cannot_be_set(name: str) -> None:
    with pytest.raises(ApiError) as error:
        render("x", kwargs={name: 1})
    assert error.value.param == "chat_template_kwargs"
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"
