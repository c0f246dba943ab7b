"""Which turns of a conversation are answered, and in what context."""

from typing import Any

import pytest

from draftforge.data.conversation import Conversation, Message, as_served, turns
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings


def test_settings_that_a_request_left_to_its_server_are_the_models_own() -> None:
    defaults = {"temperature": 0.7, "top_k": 20}
    given = SamplingSettings(temperature=1.0, top_p=0.9)
    asked = [
        talk("user", sampling=given, server_sampling=["temperature", "top_k", "min_p"]),
        talk("user", sampling=given, server_sampling=["min_p"]),
        talk("user", server_sampling=["temperature", "top_k", "top_p"]),
        talk("user"),
    ]
    assert [one.sampling for one in as_served(asked, defaults)] == [
        SamplingSettings(temperature=0.7, top_k=20, top_p=0.9),
        given,
        SamplingSettings(temperature=0.7, top_k=20),
        None,
    ]
    assert as_served(asked, {}) == asked
    assert as_served([asked[2]], {"top_p": 0.5})[0].sampling == SamplingSettings(temperature=1.0, top_p=0.5)


def talk(*roles: str, **more: Any) -> Conversation:
    messages = [Message(role=role, content=f"{role} {i}") for i, role in enumerate(roles)]
    return Conversation(id="c", domain="d", messages=messages, cluster="k", split="train", **more)


def test_user_turns_are_answered_in_order() -> None:
    first, second, third = turns(talk("system", "user", "user", "user", turn_by_turn=True))
    assert [turn.waits_for for turn in (first, second, third)] == [None, 0, 1]
    assert [m.role for m in first.context()] == ["system", "user"]
    context = third.context(["a", "b"])
    assert [m.content for m in context] == ["system 0", "user 1", "a", "user 2", "b", "user 3"]
    with pytest.raises(InputError, match="turn 2: 1 earlier answers given, 2 needed"):
        third.context(["a"])


@pytest.mark.parametrize(
    "roles, prompts",
    [
        ("system user user", [3]),  # one request is one prompt
        ("user system", [2]),  # a reminder after the question
        ("user assistant user system assistant", [1, 4]),
        ("user developer assistant", [2]),
        ("system user assistant tool tool assistant user user", [2, 5, 8]),
        ("user assistant function", [1, 3]),
        ("system", [1]),
        ("system assistant user assistant", [3]),  # a greeting answers nobody
        ("assistant user assistant assistant", [2]),  # two answers to one question
        ("user assistant assistant user", [1, 4]),
        ("assistant", []),
    ],
)
def test_a_turn_ends_at_the_last_message_before_the_assistants(roles: str, prompts: list[int]) -> None:
    conversation = talk(*roles.split())
    found = turns(conversation)
    assert [len(turn.messages) for turn in found] == prompts
    assert all(turn.context() == turn.messages and turn.waits_for is None for turn in found)


@pytest.mark.parametrize(
    "end, prompts", [("opened", [1, 3]), ("after_answer", [1, 3, 4]), ("prefill", [1, 4]), ("bare", [1, 3, 4])]
)
def test_an_assistants_last_message_is_an_answer_or_part_of_the_prompt(end: Any, prompts: list[int]) -> None:
    found = turns(talk("user", "assistant", "user", "assistant", prompt_end=end))
    assert [len(turn.messages) for turn in found] == prompts
    assert [turn.prompt_end for turn in found] == ["opened"] * (len(prompts) - 1) + [end]


def test_what_is_asked_elsewhere_is_left_out_unless_a_later_turn_waits_for_it() -> None:
    logged = talk("user", "assistant", "user", "assistant", "user", asked_elsewhere=[0, 1])
    assert [(turn.index, turn.waits_for, turn.counts) for turn in turns(logged)] == [(2, None, True)]
    asked = talk("user", "user", "user", turn_by_turn=True, asked_elsewhere=[0, 2])
    assert [(turn.index, turn.waits_for, turn.counts) for turn in turns(asked)] == [(0, None, False), (1, 0, True)]
    assert turns(asked.model_copy(update={"asked_elsewhere": [0, 1, 2]})) == []
