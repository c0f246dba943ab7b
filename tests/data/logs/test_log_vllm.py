"""Request logs of vLLM: what its RequestLogger writes, in text and in JSON; prompts that are compared with it."""

import gzip
import json
import re
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from log_reading import SAMPLES, asked, finished, read_log, write_lines

from draftforge.data.logged_prompts import PromptCheck
from draftforge.data.logs import vllm
from draftforge.data.logs.chat import Entry
from draftforge.data.logs.parsing import unrender
from draftforge.data.logs.vllm import VllmReader
from draftforge.data.mix import build_mix, load_mix
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SPOKEN = [("system", 'You are it\'s "helper".'), ("user", "Line one,\nprompt: 'x', params: y")]
COLOURS = [("user", "Hi"), ("assistant", "Hello."), ("user", "Name a colour.")]
NEW_YEARS_EVE = 1798761590.0  # 2026-12-31 23:59:50


def received(name: str, when: str = "INFO 11-28 10:00:00", prompt: str = CHATML) -> str:
    return f"{when} [logger.py:40] Received request {name}: prompt: {prompt!r}, params: SamplingParams(n=1), x: None."


def generated(name: str, when: str = "INFO 11-28 10:00:02") -> str:
    return f"{when} [logger.py:60] Generated response {name}: output: 'Yes', output_token_ids: [1], finish_reason: stop"


def test_vllm_text_log() -> None:
    read = read_log(SAMPLES / "vllm.log", "vllm", year=2026)
    assert read.talks == [
        [*COLOURS, ("assistant", "Blue.")],
        [*SPOKEN, ("assistant", 'It\'s "fine".')],
        [("system", "Be kind."), ("user", "Tell a joke")],
    ]
    assert [record.sampling for record in read.records] == [
        SamplingSettings(),
        SamplingSettings(temperature=0.7, top_k=20, top_p=0.95),
        SamplingSettings(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.1),
    ]
    assert [record.max_new_tokens for record in read.records] == [16, 256, 256]
    assert [record.template_args for record in read.records] == [
        {},
        {"enable_thinking": False},
        {"date_string": "26 Jul 2024"},
    ]
    assert [(record.prompt_tokens, record.answer_tokens) for record in read.records] == [
        (3, None),
        (4, 3),
        (None, None),
    ]
    assert (read.records[1].started, read.records[1].ended) == (NEW_YEARS_EVE, NEW_YEARS_EVE + 15)
    assert read.counts.left_out == {
        "other log line": 2,
        "joined with another line": 7,
        "raw prompt": 1,
        "no chat request": 1,
        "no text logged": 1,
        "answer without its request": 1,
        "prompt in an unread markup": 1,
    }
    assert sorted(length for _, length, _ in read.times if length == length) == [1.0, 1.0, 2.0, 15.0]


def test_a_vllm_log_without_a_year_has_lengths_and_no_dates() -> None:
    read = read_log(SAMPLES / "vllm.log", "vllm")
    assert {(record.started, record.ended) for record in read.records} == {(None, None)}
    assert sorted(length for _, length, _ in read.times if length == length) == [1.0, 1.0, 2.0, 15.0]


def test_vllm_json_log_and_dockers() -> None:
    read = read_log(SAMPLES / "vllm_json.log", "vllm")
    assert read.talks == [[*COLOURS, ("assistant", "Red.")]]
    assert read.times == [(1795860000.25, 4.5, "vllm_json")] and read.records[0].started == 1795860000.25


def test_vllm_lines_behind_the_prefixes_of_containers(tmp_path: Path) -> None:
    lines = (
        "vllm-1  | " + received("chatcmpl-1", "2026-11-28T10:00:00.5Z (APIServer pid=1) INFO 11-28 10:00:00"),
        "vllm-1  | " + generated("chatcmpl-1", "2026-11-28T10:00:02.123456789Z (APIServer pid=1) INFO 11-28 10:00:02"),
    )
    read = read_log(write_lines(tmp_path / "pod.log", *lines), "vllm")
    ((start, length, server),) = read.times
    assert (start, server) == (1795860000.5, "pod") and length == pytest.approx(1.623456, abs=1e-6)
    assert read.records[0].ended == start + length


def test_long_lines_that_containers_cut_are_joined(tmp_path: Path) -> None:
    """Docker's JSON files and the CRI format cut at 16 kB; the two streams of a container do not mix."""
    lines = [*started("c-1", asked("long " * 50)), *ended("c-1", "Yes")]
    docker, cri = [], []
    for line in lines:
        pieces = [line[i : i + 90] for i in range(0, len(line), 90)]
        for piece in pieces:
            ends = piece is pieces[-1]
            stamp = "2026-11-28T10:00:00.5Z"
            docker.append(json.dumps({"log": piece + "\n" * ends, "stream": "stderr", "time": stamp}))
            docker.append(json.dumps({"log": "Loading\n", "stream": "stdout", "time": stamp}))
            cri += [f"{stamp} stderr {'F' if ends else 'P'} {piece}", f"{stamp} stdout F Loading"]
    for kept in (docker, cri):
        read = read_log(write_lines(tmp_path / "pod.log", *kept), "vllm")
        assert read.talks == [[("user", "long " * 50), ("assistant", "Yes")]]
        assert read.records[0].started == 1795860000.5 and read.counts.read == len(kept)
        assert read.counts.left_out["other log line"] == len(kept) / 2
    text = finished("r1", asked("long " * 50))
    pieces = [f"2026-11-28T10:00:00.5Z stdout {mark} {piece}" for mark, piece in (("P", text[:99]), ("F", text[99:]))]
    assert read_log(write_lines(tmp_path / "pod.log", *pieces), "sglang").talks == [
        [("user", "long " * 50), ("assistant", "Yes")]
    ]


@pytest.mark.parametrize("size", [91, 92])
def test_containers_cut_within_characters(tmp_path: Path, size: int) -> None:
    """CRI writes the halves of a character as they are, which join; Docker replaces them, so the text is left out."""
    text, stamp = "\u65e5" * 100, "2026-11-28T10:00:00.5Z"
    vllm = [*started("c-1", asked(text)), *ended("c-1", "Yes"), *started("c-2", asked("b")), *ended("c-2", "Yes")]
    sglang = [finished("r1", asked(text)), finished("r2", asked("b"))]
    path, short = tmp_path / "pod.log", [("user", "b"), ("assistant", "Yes")]
    for kind, lines in (("vllm", vllm), ("sglang", sglang)):
        cri, docker = b"", list[str]()
        for line in map(str.encode, lines):
            for i in range(0, len(line), size):
                piece, ends = line[i : i + size], i + size >= len(line)
                cri += f"{stamp} stdout {'F' if ends else 'P'} ".encode() + piece + b"\n"
                each = re.sub("[\udc80-\udcff]", "\ufffd", piece.decode(errors="surrogateescape"))
                docker.append(json.dumps({"log": each + "\n" * ends, "stream": "stdout", "time": stamp}))
        path.write_bytes(cri)
        assert read_log(path, kind).talks == [[("user", text), ("assistant", "Yes")], short]
        read = read_log(write_lines(path, *docker), kind)
        assert read.talks == [short] and read.counts.left_out["text cut by the log"] == 1
        assert sum(read.counts.left_out.values()) + 1 == read.counts.read == len(docker)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("form", ["2026-11-28T10:00:00.5Z stdout P {}", '{{"log": "{}", "stream": "stdout"}}'])
def test_a_line_whose_last_piece_is_not_there_was_cut(tmp_path: Path, kind: str, form: str) -> None:
    path = write_lines(tmp_path / "0.log", "INFO a", form.format("Received request"), form.format(" c-1: prompt"))
    with pytest.raises(InputError, match=r"holds no conversation \(3 read, .*1 text cut by the log"):
        read_log(path, kind)


def test_pieces_that_are_no_text_when_joined_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pod.log"
    path.write_bytes(b"2026-11-28T10:00:00.5Z stdout P \xe6\x97\n2026-11-28T10:00:00.5Z stdout F a\n")
    with pytest.raises(InputError, match=r"pod\.log:1: not valid UTF-8"):
        read_log(path, "vllm")


def test_a_vllm_prompt_without_the_line_of_its_settings_is_left_out(tmp_path: Path) -> None:
    """An adapter may stand in the line that is missing, and the settings do."""
    lines = [*started("c-1", asked("a"))[:1], *ended("c-1", "Yes"), *started("c-2", asked("b")), *ended("c-2", "No")]
    read = read_log(write_lines(tmp_path / "v.log", *lines), "vllm")
    assert read.talks == [[("user", "b"), ("assistant", "No")]] and read.counts.left_out["text cut by the log"] == 1


def test_a_lost_line_shifts_no_settings_between_requests_of_one_vllm_id(tmp_path: Path) -> None:
    """Without lines of answers nothing ends a request whose prompt was lost, nor one whose settings were."""
    for lost in (0, 1):
        each = [
            started("c", asked(f"{i}"), f"11-28 10:0{i}:00", temperature=i / 10, lora_request="A()" if i == 0 else None)
            for i in range(4)
        ]
        del each[0][lost]
        read = read_log(write_lines(tmp_path / "v.log", *(line for lines in each for line in lines)), "vllm")
        asked_at = {record.messages[0].content: record.sampling for record in read.records}
        assert asked_at == {f"{i}": SamplingSettings(temperature=i / 10) for i in range(1, 4)}
        assert sum(read.counts.left_out.values()) + 3 == read.counts.read == 7


def test_times_of_unlike_kinds_make_no_length(tmp_path: Path) -> None:
    lines = (received("chatcmpl-1"), generated("chatcmpl-1", "2026-11-28T10:00:02Z INFO 11-28 10:00:02"))
    read = read_log(write_lines(tmp_path / "pod.log", *lines), "vllm")
    ((_, length, _),) = read.times
    assert length != length and read.traffic.untimed == 1 and read.talks[0][1] == ("assistant", "Yes")


def test_each_file_of_a_folder_is_a_vllm_replica_and_its_rotated_files_are_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_lines(tmp_path / "a" / "server.log.2", received("chatcmpl-1"), received("chatcmpl-2"))
    write_lines(tmp_path / "a" / "server.log.1", generated("chatcmpl-1"))
    write_lines(tmp_path / "b.log", received("chatcmpl-1", prompt=CHATML.replace("Hi", "Ho")), generated("chatcmpl-1"))
    read = read_log(tmp_path, "vllm")
    assert sorted(name for _, length, name in read.times if length == 2) == ["a/server", "b"]
    assert sorted(read.talks) == sorted(
        [[("user", "Hi"), ("assistant", "Yes")], [("user", "Ho"), ("assistant", "Yes")], [("user", "Hi")]]
    )


def test_vllm_requests_that_never_end_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.data.logs.vllm._MOST_WAITING", 2)
    lines = [received(f"chatcmpl-{i}", prompt=CHATML.replace("Hi", str(i))) for i in range(5)]
    read = read_log(write_lines(tmp_path / "v.log", *lines, generated("chatcmpl-4"), generated("chatcmpl-0")), "vllm")
    # The first three were given up to make room: the answer to number 0 comes too late.
    assert [talk[0][1] for talk in read.talks] == ["0", "1", "2", "4", "3"]
    assert read.counts.left_out == {"answer without its request": 1, "joined with another line": 1}


def test_vllm_requests_under_one_id_are_taken_apart_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses the id of its requests, and may send all of them under one."""
    parse, parsed, count = vllm.fields, list[str](), 40

    def counted(text: str) -> dict[str, str]:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(vllm, "fields", counted)
    lines = [*(received("one", f"INFO 11-28 10:{i:02}:00") for i in range(count)), *[generated("one")] * count]
    read = read_log(write_lines(tmp_path / "v.log", *lines), "vllm")
    assert len(read.talks) == count and len(parsed) <= 6 * count


def test_vllm_requests_that_wait_are_few_of_one_id_and_few_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_MOST_OF_ONE_ID", 2)
    counted = {"answer without its request": 2, "joined with another line": 2}
    lines = [*(received("one", f"INFO 11-28 10:00:{10 * i}") for i in range(4)), *[generated("one")] * 4]
    assert read_log(write_lines(tmp_path / "v.log", *lines), "vllm").counts.left_out == counted
    monkeypatch.setattr(vllm, "_MOST_WAITING_BYTES", 2500)
    lines = [*(received(str(i), prompt=CHATML.replace("Hi", "Hi" * 500)) for i in range(4)), *map(generated, "0123")]
    assert read_log(write_lines(tmp_path / "w.log", *lines), "vllm").counts.left_out == counted


def started(name: str, prompt: str, when: str = "11-28 10:00:00", **params: Any) -> list[str]:
    """The two lines of a request as vLLM 0.32 writes them."""
    adapter = params.pop("lora_request", None)
    settings = ", ".join(f"{key}={value}" for key, value in {"n": 1, "temperature": 0.0, **params}.items())
    return [
        f"DEBUG {when} [logger.py:34] Request {name} details: prompt: {prompt!r}, prompt_token_ids: [1, 2], "
        "prompt_embeds shape: None.",
        f"INFO {when} [logger.py:45] Received request {name}: params: SamplingParams({settings}), "
        f"lora_request: {adapter}.",
    ]


def ended(name: str, answer: str, when: str = "11-28 10:00:02", stream: str = "") -> list[str]:
    start = f"{when} [logger.py:60] Generated response {name}{stream}"
    return [
        f"DEBUG {start} details: output_token_ids: [7, 8, 9]",
        f"INFO {start}: output: {answer!r}, finish_reason: stop",
    ]


def test_vllm_answers_whose_ids_stand_in_a_line_of_their_own(tmp_path: Path) -> None:
    lines = [*started("c-1", asked("a")), *ended("c-1", "Yes")]
    lines += [*started("c-2", asked("b")), *ended("c-2", "No", stream=" (streaming complete)")]
    lines += [*started("c-3", asked("c")), *ended("c-3", "[tool_calls: now({})]")]
    lines += [*started("c-4", asked("d")), *ended("c-4", "<streaming_complete: 9 tokens>"), *ended("c-0", "?")]
    read = read_log(write_lines(tmp_path / "v.log", *lines), "vllm")
    assert read.talks == [
        [("user", "a"), ("assistant", "Yes")],
        [("user", "b"), ("assistant", "No")],
        [("user", "c")],
        [("user", "d")],
    ]
    assert [record.answer_tokens for record in read.records] == [3, 3, 3, 3]
    assert read.counts.left_out == {"joined with another line": 13, "answer without its request": 1}


def test_vllm_requests_that_share_an_id_are_requests_of_their_own(tmp_path: Path) -> None:
    """A session's id, sent with each of its requests: without outputs, with them, and in flight at once."""
    prompts = ["a", "b", "c", "d"]
    alone = [line for prompt in prompts for line in started("s", asked(prompt))]
    answered = [line for prompt in prompts for line in (*started("s", asked(prompt)), *ended("s", prompt.upper()))]
    (details_1, params_1), (details_2, params_2) = started("s", asked("a")), started("s", asked("b"), max_tokens=7)
    parted = [details_1, details_2, params_1, params_2, *ended("s", "?"), *ended("s", "?")]
    again = [*started("s", asked("a")), *started("s", asked("a")), *ended("s", "A")]
    for lines, talks in (
        (alone, [[("user", prompt)] for prompt in prompts]),
        (answered, [[("user", prompt), ("assistant", prompt.upper())] for prompt in prompts]),
        (parted, [[("user", "a")], [("user", "b")]]),
        (again, [[("user", "a"), ("assistant", "A")], [("user", "a")]]),
    ):
        read = read_log(write_lines(tmp_path / "v.log", *lines), "vllm")
        assert read.talks == talks and read.counts.read == len(lines)
    read = read_log(write_lines(tmp_path / "v.log", *parted), "vllm")
    assert read.counts.left_out["answer without its request"] == 2


def test_vllm_requests_of_one_id_whose_settings_may_be_each_others_are_left_out(tmp_path: Path) -> None:
    cold = started("s", asked("cold"), max_tokens=5)
    hot = started("s", asked("hot"), temperature=0.5, max_tokens=6)
    around = [*started("s", asked("before"), temperature=0.7), *ended("s", "."), *started("t", asked("other"))]
    for order in permutations(range(4)):
        if order[0] % 2 != order[1] % 2:
            continue  # each pair of lines looks like a request
        lines = [(*cold, *hot)[i] for i in order]
        read = read_log(write_lines(tmp_path / "v.log", *around, *lines, *started("s", asked("last"))), "vllm")
        assert [talk[0][1] for talk in read.talks] == ["before", "other", "last"]
        assert read.counts.left_out["several requests of one id at once"] == 2
    # The process that wrote a line tells them apart.
    for order in permutations(range(4)):
        lines = [("(APIServer pid=7) " if i < 2 else "(APIServer pid=8) ") + (*cold, *hot)[i] for i in order]
        read = read_log(write_lines(tmp_path / "v.log", *around, *lines), "vllm")
        drawn = {talk[0][1]: (one.sampling, one.max_new_tokens) for talk, one in zip(read.talks, read.records)}
        assert drawn["cold"] == (SamplingSettings(temperature=0.0), 5)
        assert drawn["hot"] == (SamplingSettings(temperature=0.5), 6)


def test_vllm_requests_that_fail_are_left_out_and_those_given_up_were_asked(tmp_path: Path) -> None:
    ends = {
        "failed (bad request): too long.": False,
        "failed due to ValueError: x.": False,
        "failed.": False,
        "aborted.": True,
    }
    for number, (end, kept) in enumerate(ends.items()):
        lines = [*started("c-1", asked("good")), *started("c-2", asked("odd"))]
        lines += [f"INFO 11-28 10:00:03 [async_llm.py:9] Request c-2 {end}", f"INFO 11-28 Request c-9 {end}"]
        read = read_log(write_lines(tmp_path / f"{number}.log", *lines), "vllm")
        assert sorted(talk[0][1] for talk in read.talks) == (["good", "odd"] if kept else ["good"])
        assert read.counts.left_out.get("failed request", 0) == (not kept)
        assert read.counts.read == len(lines)


def test_vllm_settings_of_the_request_are_handed_on(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "stop": ["END"],
        "min_tokens": 2,
        "structured_outputs": "StructuredOutputsParams(json={})",
        "logit_bias": None,
    }
    lines = started("c-1", asked("a"), **odd, lora_request="LoRARequest(lora_name='x')")
    reader = VllmReader(None)
    assert [entry for line in lines for entry in reader.feed(line, "v:1", "v")] == []
    (joined,) = reader.finish()
    assert not isinstance(joined, Entry)
    entry = joined.entry()
    request = entry.line["request"]
    assert (request["stop"], request["min_tokens"], request["n"]) == (["END"], 2, 1)
    assert request["structured_outputs"] == odd["structured_outputs"] and "logit_bias" not in request
    assert request["lora_request"] == "LoRARequest(lora_name='x')" and "prompt_embeds" not in request
    assert request["messages"] == entry.line["messages"] == [{"role": "user", "content": "a"}]


def test_vllm_lines_in_the_words_of_a_client_are_none(tmp_path: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": received("c-1")}]})
    first = '{pod="v-0"} ' + received("c-0")  # as Loki's client writes it
    read = read_log(write_lines(tmp_path / "v.log", first, f"DEBUG Request c-2 JSON body: {body}"), "vllm")
    assert len(read.talks) == 1 and read.counts.left_out == {"other log line": 1}


def test_vllm_lines_that_were_cut_give_no_request(tmp_path: Path) -> None:
    whole = received("c-1", prompt=CHATML.replace("Hi", "Hi. You.")).replace("n=1", "temperature=0.7")
    whole = whole.replace("x: None.", "lora_request: LoRARequest(lora_name='x').")
    for end in range(whole.index("You"), len(whole)):
        counts = read_log(write_lines(tmp_path / "v.log", received("c-0"), whole[:end]), "vllm").counts
        assert counts.taken == 1 and counts.left_out == {"text cut by the log": 1}


@pytest.mark.parametrize(
    "old, new", [("v.log.1", "v.log"), ("v.log-20261231", "v.log-20270101"), ("v.log.2.gz", "v.log.1")]
)
def test_vllm_logs_rotated_over_new_year(tmp_path: Path, old: str, new: str) -> None:
    """December is before January, and a request whose lines stand in two files is one."""
    december = [*started("c-1", asked("a"), "12-28 10:00:00"), *started("c-2", asked("b"), "12-31 23:59:58")]
    january = [*ended("c-2", "B", "01-01 00:00:02"), *started("c-3", asked("c"), "01-03 10:00:00")]
    text = "".join(f"{line}\n" for line in december).encode()
    (tmp_path / old).write_bytes(gzip.compress(text) if old.endswith(".gz") else text)
    write_lines(tmp_path / new, *january)
    read = read_log(tmp_path, "vllm", year=2026)
    assert {talk[0][1]: len(talk) for talk in read.talks} == {"a": 1, "b": 2, "c": 1}
    dates = {record.user_text: datetime.fromtimestamp(record.started or 0, UTC) for record in read.records}
    assert {text: (date.year, date.month) for text, date in dates.items()} == {
        "a": (2026, 12),
        "b": (2026, 12),
        "c": (2027, 1),
    }
    assert [length for _, length, _ in read.times if length == length] == [4.0]


def test_vllm_years_are_counted_for_each_server_and_late_lines_belong_to_the_old_year(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        dates = [
            "11-30 00:00:00",
            "12-31 23:59:59",
            "01-01 00:00:01",
            "12-31 23:59:58",
            "02-28 00:00:00",
            "11-30 00:00:00",
        ]
        lines = [line for i, date in enumerate(dates) for line in started(f"c-{i}", asked(f"{name} {i}"), date)]
        write_lines(tmp_path / name, *lines)
    records = read_log(tmp_path, "vllm", year=2026).records
    years = [datetime.fromtimestamp(record.started or 0, UTC).year for record in records]
    assert years == [2026, 2026, 2027, 2026, 2027, 2027] * 2


def test_vllm_empty_messages_are_kept_as_they_were_served() -> None:
    empty = "<|im_start|>system\n<|im_end|>\n"
    found = unrender(asked("Hi", empty))
    assert found is not None and found.messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Hi"},
    ]
    blank = unrender(asked(" \n", "<|im_start|>system\n\n<|im_end|>\n"))
    assert blank is not None and [message["content"] for message in blank.messages] == ["\n", " \n"]
    only = unrender("<|im_start|>system\nGo.<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert only is not None and only.messages == [{"role": "system", "content": "Go."}]
    assert only.template_args == {"enable_thinking": True}
    assert only.pieces == ["<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"]


RENDERED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_prompt_that_is_taken_apart_is_compared_with_the_logged_one(tmp_path: Path, kind: str) -> None:
    """Redacted ones too. Another template makes another prompt of the same messages, which shows."""
    system = "<|im_start|>system\nBe kind.<|im_end|>\n"
    texts = [" ".join(f"word{(i + 1) * j % 89}" for j in range(1, 9)) for i in range(60)]
    prompts = [
        asked(f"{text} ann@example.org", *(system,) * (i % 2)) + "<think>\n\n</think>\n\n" * (i % 3 == 0)
        for i, text in enumerate(texts)
    ]
    write_lines(
        tmp_path / "engine.log",
        *(
            line
            for i, prompt in enumerate(prompts)
            for line in (started(f"c-{i}", prompt) if kind == "vllm" else [finished(f"r{i}", prompt)])
        ),
    )
    source = {"kind": kind, "path": "engine.log", "domain": "d"}
    build_mix(MixSettings.model_validate({"sources": [source]}), tmp_path, tmp_path / "mix")
    mix, tokenizer = load_mix(tmp_path / "mix"), byte_level_tokenizer(["Hi"], 262)
    assert len(mix) > 50 and all("<email>" in str(one.messages) for one in mix)
    thoughtful = ["enable_thinking" not in one.template_args for one in mix]
    for template, same in (
        (RENDERED, [True] * len(mix)),
        ("<bos>" + RENDERED, [True] * len(mix)),  # a log may lack it
        (RENDERED.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}"), [False] * len(mix)),
        (RENDERED.replace("<think>\n\n", ""), thoughtful),
    ):
        tokenizer.chat_template = template
        check = PromptCheck(tokenizer, mix)
        assert [check.refusal(one, 0) is None for one in mix] == same
