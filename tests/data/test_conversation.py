"""Which turns of a conversation are answered, in what context, and how they are rendered."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from draftforge.data.conversation import Conversation, Message, Role, render, turns
from draftforge.errors import InputError


def talk(*roles: Role) -> Conversation:
    messages = [Message(role=role, content=f"{role} {i}") for i, role in enumerate(roles)]
    return Conversation(id="c", domain="d", messages=messages, cluster="k", split="train")


def test_user_turns_are_answered_in_order() -> None:
    first, second, third = turns(talk("system", "user", "user", "user"))
    assert [turn.waits_for for turn in (first, second, third)] == [None, 0, 1]
    assert [m.role for m in first.context()] == ["system", "user"]
    context = third.context(["a", "b"])
    assert [m.content for m in context] == ["system 0", "user 1", "a", "user 2", "b", "user 3"]
    with pytest.raises(InputError, match="turn 2: 1 earlier answers given, 2 needed"):
        third.context(["a"])


def test_logged_turns_keep_their_context() -> None:
    logged = turns(talk("system", "user", "assistant", "tool", "tool", "assistant", "user", "user"))
    assert [(turn.index, turn.waits_for, len(turn.messages)) for turn in logged] == [
        (0, None, 2),
        (1, None, 5),
        (2, None, 8),
    ]
    assert all(turn.context() == turn.messages for turn in logged)


def test_greetings_and_doubled_answers_are_not_answered() -> None:
    found = turns(talk("assistant", "user", "assistant", "assistant"))
    assert [len(turn.messages) for turn in found] == [2]


def test_what_is_asked_elsewhere_is_left_out_unless_a_later_turn_waits_for_it() -> None:
    logged = talk("user", "assistant", "user", "assistant", "user").model_copy(update={"asked_elsewhere": [0, 1]})
    assert [(turn.index, turn.waits_for, turn.counts) for turn in turns(logged)] == [(2, None, True)]
    asked = talk("user", "user", "user").model_copy(update={"asked_elsewhere": [0, 2]})
    assert [(turn.index, turn.waits_for, turn.counts) for turn in turns(asked)] == [(0, None, False), (1, 0, True)]
    assert turns(asked.model_copy(update={"asked_elsewhere": [0, 1, 2]})) == []


@pytest.fixture(scope="module")
def tokenizer(tiny_target_folder: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target_folder)


def test_render_uses_tools_and_template_arguments(tokenizer: Any) -> None:
    message = [Message(role="user", content="Hi")]
    text = tokenizer.decode(render(tokenizer, message, [{"name": "clock"}], {"enable_thinking": False}))
    assert text == (
        '<|im_start|>system\nTools: [{"name": "clock"}]<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n'
        "<|im_start|>assistant\n<think></think>"
    )


def test_render_gives_tool_arguments_as_objects() -> None:
    call = {"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    message = Message(role="assistant", content="", tool_calls=[call])
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    assert call["function"]["arguments"] == '{"zone": "UTC"}'  # the stored message is as logged


def test_render_errors_are_one_line(tokenizer: Any) -> None:
    own = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ raise_exception('roles must\n alternate') }}"
        with pytest.raises(InputError, match="its chat template refuses the messages \\(roles must alternate\\)"):
            render(tokenizer, [Message(role="user", content="Hi")])
        tokenizer.chat_template = None
        with pytest.raises(InputError, match="has no chat template"):
            render(tokenizer, [Message(role="user", content="Hi")])
    finally:
        tokenizer.chat_template = own
