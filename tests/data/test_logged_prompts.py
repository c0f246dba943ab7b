"""Prompts of a mix are compared with what its log tells of them: the number of their tokens, the hash of their text."""

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from log_reading import write_lines
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing

from draftforge.data.chat_template import render, turn_prompt
from draftforge.data.conversation import Conversation, Message, turns
from draftforge.data.logged_prompts import (
    EITHER_WAY,
    NOT_ANSWERED,
    OTHER_COUNT,
    OTHER_PROMPT,
    UNPROVEN,
    PromptCheck,
)
from draftforge.data.logs.parsing import prompt_digest
from draftforge.data.mix import build_mix, load_manifest, load_mix
from draftforge.data.settings import MixSettings

TEMPLATE = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ strftime_now('%Y') if dated }}\
{% if add_generation_prompt %}<new>{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}\
{% if effort_told %}{{ reasoning_effort }}{% endif %}{% endif %}"""
START = 1_795_860_000.0
WRAPPED = {"frequency_penalty": 0, "presence_penalty": 0}  # by Langfuse's client for Python
Json = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def length(tokenizer: Any) -> Callable[..., int]:
    def count(messages: list[Json], **arguments: Any) -> int:
        said = [Message(role=one["role"], content=one["content"]) for one in messages]
        return len(render(tokenizer, said, template_args=arguments))

    return count


def say(*texts: str) -> list[Json]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def logged(model: str, messages: list[Json], tokens: int | None, at: float = 0.0, **more: Any) -> Json:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens}}
    answer = {"choices": [{"message": {"role": "assistant", "content": "Fine."}}], **usage}
    return {"request": {"model": model, "messages": messages, **more}, "response": answer, "started": START + at}


def mix_of(folder: Path, lines: list[Json]) -> dict[str, Conversation]:
    """Conversations of a mix of these lines, by the text of their first message."""
    fill = [logged("fill", say(f"word{i} word{i * 7} word{i * 13}"), None) for i in range(60)]
    write_lines(folder / "log.jsonl", *map(json.dumps, [*lines, *fill]))
    source = {"kind": "openai", "path": "log.jsonl", "domain": "d"}
    build_mix(MixSettings.model_validate({"sources": [source], "near_threshold": 1.0}), folder, folder / "mix")
    return {
        one.messages[0].text: one for one in load_mix(folder / "mix") if not one.messages[0].text.startswith("word")
    }


def test_what_a_log_lost_shows_by_the_number_of_tokens(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    texts = [f"question {i} of {'many ' * (i % 7)}words" for i in range(40)]
    lost, redacted = {"enable_thinking": False}, "write to ann@example.org"
    lines = [
        *(logged("same", say(f"same {text}"), length(say(f"same {text}"))) for text in texts),
        *(
            logged("lost", say(f"lost {text}"), length(say(f"lost {text}"), **(lost if i % 4 == 0 else {})))
            for i, text in enumerate(texts)
        ),
        # Its server switched thoughts off by default.
        *(logged("off", say(f"off {text}"), length(say(f"off {text}"), **lost)) for text in texts),
        *(logged("other", say(f"other {text}"), 7 + len(text.split())) for text in texts),
        # Streamed answers are counted by another one than those of the same model that are not.
        *(logged("same", say(f"streamed {text}"), 7 + len(text.split()), stream=True) for text in texts),
        logged("same", say(redacted), length(say(redacted))),
        # The same question with and without the lost setting: as one of them asked it.
        *(logged("lost", say("both"), length(say("both"), **given)) for given in (lost, {}, {})),
    ]
    mix = mix_of(tmp_path, lines)
    check = PromptCheck(tokenizer, list(mix.values()))
    refused = {text: reason for text, one in mix.items() if (reason := check.refusal(one, 0)) is not None}
    assert set(refused) == {f"lost {text}" for text in texts[::4]} | {f"off {text}" for text in texts}
    first = say("lost " + texts[0])
    assert refused[first[0]["content"]] == f"{OTHER_COUNT} ({length(first)}, logged {length(first, **lost)})"
    # What is asked has the ids that it has without any log.
    (turn,) = turns(mix["both"])
    assert check.ids(mix["both"], turn) == render(tokenizer, [Message(role="user", content="both")])
    told = {line.split(":")[0].removeprefix("prompt tokens of openai, model "): line for line in check.lines()}
    assert set(told) == {"same", "lost", "off", "other", "same, streamed"}
    assert told["same"].endswith(
        "all 40 requests have the logged number; 1 not compared, as something in them was redacted or nobody counted it"
    )
    assert "11 of 43 requests have another number than logged (" in told["lost"]
    assert "; with `enable_thinking: false` 10 of 10 tried have the logged number; the log does not" in told["lost"]
    assert "with `enable_thinking: false` 40 of 40 tried" in told["off"]
    for name, begin in (("other", "other"), ("same, streamed", "streamed")):
        apart = [7 + len(text.split()) - length(say(f"{begin} {text}")) for text in texts]
        least, most = min(apart), max(apart)
        assert ": not compared: of 40 requests 40 have another number (" in told[name] and "at log.jsonl:" in told[name]
        assert f"; {least:+} to {most:+} tokens), as of another tokenizer or template, or where the" in told[name]


def test_whole_prompts_that_an_engine_put_a_second_bos_in_front_of_are_left_out_however_many_they_are(
    tmp_path: Path, length: Callable[..., int]
) -> None:
    """A client renders the prompt and sends it to `/v1/completions`, which adds special tokens."""
    adds = byte_level_tokenizer(["Hi there"], 262)
    adds.chat_template = TEMPLATE
    adds.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{adds.bos_token} $A", special_tokens=[(adds.bos_token, adds.bos_token_id)]
    )
    texts = {model: [f"{model} {i} of {'many ' * (i % 7)}words" for i in range(8)] for model in ("all", "some", "more")}
    lines = [
        logged(model, say(text), length(say(text)) + (2 if model == "more" else model == "all" or i == 5))
        for model, some in texts.items()
        for i, text in enumerate(some)
    ]
    mix = mix_of(tmp_path, lines)
    check = PromptCheck(adds, list(mix.values()))
    refused = {text for text, one in mix.items() if check.refusal(one, 0) is not None}
    assert refused == {*texts["all"], texts["some"][5]}
    told = {line.split(":")[0].removeprefix("prompt tokens of openai, model "): line for line in check.lines()}
    end = "of {0} tried have the logged number; a capture never asks with a second BOS"
    assert "8 of 8 requests have another number than logged (" in told["all"]
    for name, number in (("all", 8), ("some", 1)):
        assert f"; with `add_special_tokens: true` {number} {end.format(number)}" in told[name]
    assert "not compared: of 8 requests 8 have another number (" in told["more"]
    # A tokenizer that adds none explains nothing.
    none = byte_level_tokenizer(["Hi there"], 262)
    none.chat_template = TEMPLATE
    check = PromptCheck(none, list(mix.values()))
    assert {text for text, one in mix.items() if check.refusal(one, 0) is not None} == {texts["some"][5]}


@pytest.mark.parametrize("same", [1, 4])
def test_what_may_have_had_another_prompt_is_asked_where_the_log_shows_the_same_one(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int], same: int
) -> None:
    """LiteLLM's calls without a system prompt, and targets whose prompts vLLM makes by other code."""
    texts = {f"question {i} of {'many ' * i}words": i for i in range(8)}
    redacted = "write to ann@example.org"
    calls = [
        {"call_type": call, "model": "m", "messages": say(f"{call} {text}"), "prompt_tokens": tokens}
        for call in ("anthropic_messages", "acompletion")
        for text, i in {**texts, redacted: 0}.items()
        for tokens in [length(say(f"{call} {text}")) + (0 if i < same else -1 if i == 7 else 40)]
    ]
    fill = [{"call_type": "acompletion", "messages": say(f"word{i} word{i * 7} word{i * 13}")} for i in range(60)]
    write_lines(tmp_path / "log.jsonl", *map(json.dumps, [*calls, *fill]))
    source = {"kind": "litellm", "path": "log.jsonl", "domain": "d", "template_args": {"enable_thinking": True}}
    build_mix(MixSettings.model_validate({"sources": [source], "near_threshold": 1.0}), tmp_path, tmp_path / "mix")
    mix = load_mix(tmp_path / "mix")

    def asked(*settings: bool) -> dict[str, set[str]]:
        check = PromptCheck(tokenizer, mix, *settings)
        found: dict[str, set[str]] = {"anthropic": set(), "acompletion": set(), "word": set()}
        for one in mix:
            (turn,), text = turns(one), one.messages[0].text
            name = next(name for name in found if text.startswith(name))
            if check.refusal(one, turn.index) is None:
                found[name].add(text.split(" ")[2] if name != "word" else text)
        return found

    # Where most numbers are others, they are of another tokenizer, or of a part that the log lacks: they prove nothing.
    every, fillers = {*"01234567", "to"}, {" ".join(f"word{i * n}" for n in (1, 7, 13)) for i in range(60)}
    proven = {str(i) for i in range(same)} if same == 4 else set()
    assert asked() == {"anthropic": proven, "acompletion": (proven | {"to"}) if proven else every, "word": fillers}
    assert asked(True) == {"anthropic": proven, "acompletion": proven, "word": set()}
    every = proven | {"to"} if proven else every
    assert asked(True, True) == asked(False, True) == {"anthropic": every, "acompletion": every, "word": fillers}
    line = next(line for line in PromptCheck(tokenizer, mix).lines(sampled=True) if "without a system prompt" in line)
    assert (f"not compared: of 8 requests {8 - same} have another number" in line) == (same == 1)
    assert "1 not compared, as" not in line
    assert "LiteLLM logs no system prompt that was sent as blocks: where it counts others than the prompt has" in line


def test_requests_of_the_responses_api_are_asked_where_the_number_of_tokens_shows_that_they_continue_none(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    """Langfuse's client does not log `previous_response_id`: a request that continues a response looks like a first."""
    message: Json = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}

    def observed(text: str, tokens: int | None, **more: Any) -> str:
        one = {"input": say(text), "output": message, "usage_details": tokens and {"input_tokens": tokens}}
        return json.dumps({"type": "GENERATION", "model": "m", "model_parameters": WRAPPED, **one, **more})

    def read(*lines: str) -> tuple[Json, dict[str, bool]]:
        write_lines(tmp_path / "log.jsonl", *lines)
        source = {"kind": "langfuse", "path": "log.jsonl", "domain": "d", "template_args": {"enable_thinking": True}}
        folder = tmp_path / str(len(lines))
        build_mix(MixSettings.model_validate({"sources": [source], "near_threshold": 1.0}), tmp_path, folder)
        mix = load_mix(folder)
        check = PromptCheck(tokenizer, mix)
        return load_manifest(folder)["left_out"], {
            one.messages[0].text: check.refusal(one, 0) is None for one in mix if one.messages[0].text[:4] != "word"
        }

    # Whatever tells of the API; what no number shows is left out, and chat completions need none.
    chat = {"role": "assistant", "content": "Yes."}
    lines = [
        *(observed(f"first {i}", length(say(f"first {i}"))) for i in "ab"),
        *(observed(f"and {i}?", 40 + length(say(f"and {i}?"))) for i in "abc"),
        observed("uncounted", None),
        observed("uncounted chat", None, output=chat),
        observed("a summary", None, output=chat, model_parameters={"reasoning_summary": "auto"}),
        observed("a call", None, output=[{"type": "reasoning", "summary": []}, {"type": "function_call"}]),
        observed("a text", 40, input="Hi"),
        *(observed(f"word{i} word{i * 7} word{i * 13}", None, output=chat) for i in range(60)),
    ]
    left_out, asked = read(*lines)
    assert left_out == {"earlier messages that the log may lack": 3, "no chat request": 1}
    assert [text for text, is_asked in sorted(asked.items()) if is_asked] == ["uncounted chat"]
    assert len(asked) == 6
    # Where most numbers are the prompts' own, they are of the target's tokenizer.
    more = [observed(f"again {i}", length(say(f"again {i}"))) for i in "cd"]
    _, asked = read(*lines, *more)
    assert [text for text, is_asked in sorted(asked.items()) if is_asked] == [
        *("again c", "again d", "first a", "first b", "uncounted chat")
    ]


def test_an_extra_body_is_read_as_the_number_of_tokens_tells(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    """A client's call, of which openai 3.57 sends the fields, and a body with that field, which vLLM passes over."""
    off = {"enable_thinking": False}
    sizes = {name: {"client": length(say(name), **off), "wire": length(say(name))} for name in "abcdefgh"}
    extra: Json = {"extra_body": {"chat_template_kwargs": off}}
    lines = [
        *(logged("m", say(name), sizes[name]["client" if name < "e" else "wire"], **extra) for name in "abcdefg"),
        logged("m", say("h"), 99, **extra),
        logged("silent", say("nothing told"), None, **extra),
        logged("silent", say("no other prompt"), None, extra_body={"chat_template_kwargs": {"unread": 1}, "top_k": 3}),
        # A thread whose last request was one of a client: its first turn goes with that.
        logged("m", say("one", "two", "three"), length(say("one", "two", "three"), **off), **extra),
        logged("m", say("x", "y", "z"), length(say("x", "y", "z")), **extra),
    ]
    mix = mix_of(tmp_path, lines)

    def ids(check: PromptCheck, name: str) -> list[str | int]:
        one = mix[name]
        return [check.refusal(one, turn.index) or len(check.ids(one, turn)) for turn in turns(one)]

    check = PromptCheck(tokenizer, list(mix.values()))
    assert {name: ids(check, name) for name in "abcdefg"} == {
        name: [sizes[name]["client" if name < "e" else "wire"]] for name in "abcdefg"
    }
    assert ids(check, "h") == [f"{OTHER_COUNT} ({sizes['h']['client']}, logged 99)"]
    assert ids(check, "nothing told") == [EITHER_WAY]
    assert ids(check, "no other prompt") == [length(say("no other prompt"))]
    assert ids(check, "one") == [length(say("one"), **off), length(say("one", "two", "three"), **off)]
    assert ids(check, "x") == [length(say("x")), length(say("x", "y", "z"))]
    # Shown prompts are those of the same reading.
    for name, arguments in (("x", {}), ("one", off)):
        asked = check.as_asked(mix[name], turns(mix[name])[-1])
        assert len(turn_prompt(tokenizer, *asked).whole) > 0 and asked[0].template_args.get("enable_thinking") == (
            arguments.get("enable_thinking")
        )
    told = PromptCheck(tokenizer, list(mix.values()), ask_unproven=True)
    assert ids(told, "nothing told") == [length(say("nothing told"), **off)]
    assert ids(told, "h") == ids(check, "h") and ids(told, "e") == ids(check, "e")


def test_a_request_of_four_readings_is_asked_in_the_one_that_has_the_logged_number(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    """Its `extra_body` was sent as its fields or as it is, to the Messages API or to chat completions, which pass over
    `system`."""
    off = {"enable_thinking": False}
    more: Json = {"system": "Be brief.", "extra_body": {"chat_template_kwargs": off}}
    prompts: dict[str, tuple[bool, Json]] = {"a": (True, off), "b": (False, off), "c": (True, {}), "d": (False, {})}

    def made(name: str) -> list[Json]:
        return [{"role": "system", "content": "Be brief."}] * prompts[name][0] + say(name)

    sizes = {name: length(made(name), **prompts[name][1]) for name in prompts}
    assert len(set(sizes.values())) == 4
    lines = [logged("m", say(name), sizes[name], **more) for name in prompts]
    lines += [logged("m", say(f"filler {i}"), length(say(f"filler {i}"))) for i in range(8)]
    lines += [logged("m", say("other"), 99, **more), logged("silent", say("untold"), None, **more)]
    for line in lines:
        del line["response"]["choices"]  # their form tells whose they are
    mix_of(tmp_path, lines)
    mix = load_mix(tmp_path / "mix")
    check = PromptCheck(tokenizer, mix)
    found = {one.messages[-1].text: (check.refusal(one, 0) or check.ids(one, turns(one)[0]), one) for one in mix}
    assert len(found["a"][1].readings()) == 4
    for name in prompts:
        said = [Message(role=one["role"], content=one["content"]) for one in made(name)]
        assert found[name][0] == render(tokenizer, said, template_args=prompts[name][1])
    assert found["untold"][0] == EITHER_WAY and str(found["other"][0]).startswith(OTHER_COUNT)


def received(messages: list[Json]) -> Json:
    return {"event": "request.received.openai", "obj": {"model": "m", "messages": messages}}


def finished(text: str, status: int | None = None) -> Json:
    """SGLang cuts the middle out of long texts at level 2. Clients may send one id again."""
    cut = text if len(text) <= 2048 else f"{text[:1024]}...{text[-1024:]}"
    reason: Json = {"type": "stop"} if status is None else {"type": "abort", "status_code": status}
    return {
        "event": "request.finished",
        "obj": {"rid": "r", "text": cut},
        "out": {"meta_info": {"finish_reason": reason}},
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_a_request_that_sglang_received_is_asked_if_its_prompt_is_among_those_served(
    tmp_path: Path, tokenizer: Any, reverse: bool
) -> None:
    lower = copy(tokenizer)
    lower._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    lower.backend_tokenizer.normalizer = Lowercase()
    long, retried, private = "long " * 408, "<user>retried<new>", "write to ann@example.org"
    names = ("served", "DECODED", "other template", long, "refused", "retried", "in flight", private)
    ends = [
        *(finished("<user>served<new>"), finished("<user>decoded<new>")),
        *(finished("<user>other template<new><no thoughts>"), finished(f"<user>{long}<new>")),
        *(finished("<user>refused<new>", 400), finished(retried, 500), finished(retried)),
        # A thread's last prompt proves the turns that its history holds alone, not those of requests of their own.
        *(finished("<user>one<assistant>two<user>three<new>"), finished("<user>x<new>")),
    ]
    fill = [f"word{i} word{i * 7} word{i * 13}" for i in range(60)]
    lines = [received(say(name)) for name in (*names, "x", *fill)]
    lines += [received(say("one", "two", "three")), received(say("x", "y", "z"))]
    lines += [*ends, *(finished(f"<user>{text}<new>") for text in fill)]
    write_lines(tmp_path / "a.log", *map(json.dumps, lines[::-1] if reverse else lines))
    # Nothing is compared where a log shows no served prompt.
    alone = [received(say("alone")), {"event": "request.finished", "obj": {"rid": "r"}, "out": {}}]
    write_lines(tmp_path / "b.log", *map(json.dumps, alone))
    sources = [{"kind": "sglang", "path": name, "domain": "d"} for name in ("a.log", "b.log")]
    allowed = {"near_threshold": 1.0, "may_be_unanswered": ["b.log"]}
    build_mix(MixSettings.model_validate({"sources": sources, **allowed}), tmp_path, tmp_path / "mix")

    def found(**settings: bool) -> dict[str, list[str | None]]:
        mix = load_mix(tmp_path / "mix")
        check = PromptCheck(lower, mix, **settings)
        told = {
            one.messages[0].text.replace("<email>", "ann@example.org"): [
                check.refusal(one, t.index) for t in turns(one)
            ]
            for one in mix
        }
        assert all(told.pop(text) == [None] for text in fill)
        return told

    shown: dict[str, list[str | None]] = {name: [None] for name in ("served", "DECODED", "retried", private, "alone")}
    shown |= {"one": [None, None], "refused": [NOT_ANSWERED]}
    unproven = {name: [UNPROVEN] for name in ("other template", long, "in flight")}
    assert found() == shown | unproven | {"x": [None, UNPROVEN]}
    assert found(ask_unproven=True) == shown | {name: [None] for name in unproven} | {"x": [None, None]}


def test_each_turn_of_a_thread_has_the_time_and_the_prompt_of_its_own_request(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    threads = {name: say(name, "one", "two", "three", "four") for name in ("whole", "first", "last", "alone")}
    wrong = {"whole": (), "first": (1,), "last": (5,), "alone": (5,)}
    lines = [
        logged("m", messages[:size], length(messages[:size]) + (size in wrong[name]), at=size * 86400.0)
        for name, messages in threads.items()
        for size in ((5,) if name == "alone" else (1, 3, 5))
    ]
    lines += [logged("m", say(f"filler {i}"), length(say(f"filler {i}"))) for i in range(20)]
    lines.append(logged("m", say("whole"), length(say("whole")), at=2 * 86400.0))  # asked again a day later
    mix = mix_of(tmp_path, lines)
    check = PromptCheck(tokenizer, list(mix.values()))
    asked = {name: [turn for turn in range(3) if check.refusal(mix[name], turn) is None] for name in threads}
    # What was asked in the history of a request alone goes with that.
    assert asked == {"whole": [0, 1, 2], "first": [1, 2], "last": [0, 1], "alone": []}
    days = {name: [(mix[name].time_of(turn) or 0.0) - START for turn in range(3)] for name in ("whole", "alone")}
    assert days == {"whole": [2 * 86400.0, 3 * 86400.0, 5 * 86400.0], "alone": [5 * 86400.0] * 3}


def test_each_prompt_whose_text_is_logged_is_compared_with_it(tokenizer: Any) -> None:
    said = [Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(("a", "b", "c"))]
    form: Json = {"domain": "d", "cluster": "k", "split": "train", "messages": said}
    plain = Conversation(id="plain", **form)
    texts = [turn_prompt(tokenizer, plain, turn).text for turn in turns(plain)]
    for told, refused in (
        ({}, set()),
        ({0: texts[0], 1: texts[1]}, set()),
        ({0: texts[0], 1: texts[1] + "\n"}, {1}),
        ({0: "<bos>" + texts[0] + "\n"}, {0}),
        ({1: texts[1] + "\n"}, {0, 1}),
        ({1: "<bos>" + texts[1]}, set()),
    ):
        prompts = [{"turn": turn, "digests": [prompt_digest(text)]} for turn, text in told.items()]
        one = Conversation.model_validate({"id": "one", **form, "logged_prompts": prompts})
        check = PromptCheck(tokenizer, [one])
        found = {turn: reason for turn in (0, 1) if (reason := check.refusal(one, turn)) is not None}
        assert found == dict.fromkeys(refused, OTHER_PROMPT), told


def test_a_prompt_that_its_response_shows_is_compared_with_that(tmp_path: Path, tokenizer: Any) -> None:
    """vLLM shows its text (`return_prompt_text`) or its ids (`return_token_ids`), in a stream in the first chunk."""
    told = {"a": "<user>a<new>", "b": "<system>Brief.<user>b<new>", "ann@example.org": "<user>ann@example.org<new>"}
    lines = [logged("m", say(name), None) for name in told]
    for line, text in zip(lines, told.values()):
        line["response"]["prompt_text"] = text
    streamed = logged("ids", say("c"), None, stream=True)
    first: Json = {"choices": [{"delta": {"content": "Fine."}}], "prompt_token_ids": [1, 2, 3]}
    streamed["response"] = [first, {"choices": [{"delta": {"content": "!"}}]}]
    mix = mix_of(tmp_path, [*lines, streamed])
    check = PromptCheck(tokenizer, list(mix.values()))
    assert {name: check.refusal(one, 0) for name, one in mix.items() if name != "c"} == {
        **dict.fromkeys(("a", "<email>")),
        "b": OTHER_PROMPT,
    }
    (count,) = mix["c"].logged_prompts[0].counts
    assert (count.counter, count.tokens) == ("openai, model ids, streamed", 3)


@pytest.mark.parametrize("kind", ["openai", "litellm", "langfuse"])
def test_a_request_that_holds_its_own_answer_may_have_been_sent_without_it(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int], kind: str
) -> None:
    """Clients put the answer, and results of tools, into the list that they sent; some loggers write it only then."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answers: list[Json] = [{"content": "Fine."}, {"content": "", "tool_calls": [call]}]
    same = {"content": None, "tool_calls": [{**call, "index": 0, "function": {"name": "f", "arguments": '{"a":1}'}}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    sent = {"short": say("short"), "whole": [*say("whole"), {"role": "assistant", "content": "Fine."}]}
    counted = {name: length(messages) for name, messages in sent.items()} | {"called": length(say("called"))}
    requests = [
        ("short", say("short", "Fine."), answers[0]),
        ("whole", say("whole", "Fine."), answers[0]),
        ("untold", say("untold", "Fine."), answers[0]),
        ("called", [*say("called"), {"role": "assistant", **same}, result], answers[1]),
        # Another answer, and one that stands elsewhere.
        ("other", say("other", "Good."), answers[0]),
        ("earlier", say("earlier", "Fine.", "And now?"), answers[0]),
    ]
    lines = []
    for name, messages, answer in requests:
        tokens, said = counted.get(name), {"role": "assistant", **answer}
        lines.append(
            {
                "openai": {
                    "request": {"model": "m", "messages": messages},
                    "response": {"choices": [{"message": said}], "usage": {"prompt_tokens": tokens}},
                },
                "litellm": {
                    "call_type": "acompletion",
                    "messages": messages,
                    "response": {"choices": [{"message": said}]},
                    "prompt_tokens": tokens,
                },
                "langfuse": {
                    "type": "GENERATION",
                    "input": messages,
                    "output": said,
                    "usage_details": {"input": tokens},
                    "model_parameters": WRAPPED,
                },
            }[kind]
        )
    write_lines(tmp_path / "a.jsonl", *map(json.dumps, lines))
    source = {"kind": kind, "path": "a.jsonl", "domain": "d", "template_args": {"enable_thinking": True}}
    fill = {"kind": "prompts", "path": "fill.txt", "domain": "d"}
    write_lines(tmp_path / "fill.txt", *(f"word{i} word{i * 7} word{i * 13}" for i in range(60)))
    build_mix(
        MixSettings.model_validate({"sources": [source, fill], "near_threshold": 1.0}), tmp_path, tmp_path / "mix"
    )
    mix = {one.messages[0].text: one for one in load_mix(tmp_path / "mix")}
    check, found = PromptCheck(tokenizer, list(mix.values())), {}
    # Langfuse's client for JavaScript may have written what was put behind a later request.
    assert ("other" in mix) == (kind != "langfuse")
    for name in (name for name, *_ in requests if name in mix):
        *_, last = turns(mix[name])
        found[name] = check.refusal(mix[name], last.index) or check.ids(mix[name], last)
    texts = {name: tokenizer.decode(ids) if isinstance(ids, list) else ids for name, ids in found.items()}
    assert texts == {
        "short": "<user>short<new>",
        "whole": "<user>whole<assistant>Fine.<new>",
        "untold": EITHER_WAY,
        "called": "<user>called<new>",
        # What LiteLLM does not log may continue it.
        **({"other": "<user>other<assistant>Good.<new>"} if kind == "openai" else {}),
        **({"other": EITHER_WAY} if kind == "litellm" else {}),
        "earlier": "<user>earlier<assistant>Fine.<user>And now?<new>",
    }


def test_a_turn_that_the_template_refuses_leaves_those_before_it_in_doubt(tokenizer: Any) -> None:
    """Where vLLM makes the prompts by code of its own: what is logged of the last turn shows nothing of the first."""
    said = [Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(("a", "b", "refused"))]
    form: Json = {"domain": "d", "cluster": "k", "split": "train", "messages": said, "engine": "vllm"}
    one = Conversation.model_validate({"id": "o", **form, "logged_prompts": [{"turn": 1, "counts": [["m", 9, 1]]}]})
    strict = copy(tokenizer)
    strict.chat_template = "{% if messages[-1].content == 'refused' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    assert [PromptCheck(strict, [one], True).refusal(one, turn) for turn in (0, 1)] == [UNPROVEN, UNPROVEN]
    assert [PromptCheck(strict, [one]).refusal(one, turn) for turn in (0, 1)] == [None, None]


def test_what_a_gateway_may_have_added_to_is_asked_where_the_number_of_tokens_shows_the_prompt(
    tmp_path: Path, tokenizer: Any, length: Callable[..., int]
) -> None:
    adding: list[Json] = [{"prompt_id": "p1"}, {"files": [{"type": "file", "id": "f"}]}, {"tool_ids": []}, {}]
    lines = [
        logged("m", say(f"{name} {number}"), more and length(say(f"{name} {number}")) + more - 1, **fields)
        for number, fields in enumerate(adding)
        for name, more in (("told", 1), ("untold", None), ("longer", 5))
    ]
    mix = mix_of(tmp_path, lines)
    check = PromptCheck(tokenizer, list(mix.values()))
    refused = {name: str(check.refusal(mix[name], 0)).partition(" (")[0] for name in mix if "told" in name}
    assert refused == {
        **{f"told {number}": "None" for number in range(4)},
        **{f"untold {number}": UNPROVEN if number < 2 else "None" for number in range(4)},
    }
    assert all(str(check.refusal(mix[f"longer {number}"], 0)).startswith(OTHER_COUNT) for number in (2, 3))
