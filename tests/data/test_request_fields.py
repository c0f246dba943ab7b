"""The audit tables of `docs/logs.md`: every field of the engines' schemas has a row, and does what the row says."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from draftforge.data.logs.chat import LeftOut, Reason, Timing
from draftforge.data.records import Record, parse
from draftforge.data.settings import FileSource

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "logs.md").read_text()
VLLM = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k
    min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    stream_interval"""
"""Fields of vLLM 0.32's ChatCompletionRequest."""
SGLANG = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
    parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids return_token_ids
    return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
    sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 reasoning
    reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex
    no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path session_id session_params
    separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
    use_audio_in_video images_config video_config mm_processor_kwargs custom_logit_processor custom_params
    watermark input_ids rid extra_key cache_salt priority bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"""
"""Fields of SGLang 0.5.23's ChatCompletionRequest, and `reasoning`, which its validator reads."""
MESSAGES_API = """messages max_tokens metadata output_config thinking stop_sequences stream system temperature
    tool_choice tools top_k top_p chat_template_kwargs"""
VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Ho"}],
    "tools": [{"type": "function", "function": {"name": "now"}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"title": "t"}],
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "kv_transfer_params": {"prompt_token_ids": [1]},
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "n": 3,
    "seed": 5,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 0.5),
    **dict.fromkeys(("top_k", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens"), 7),
}


def rows(title: str) -> dict[str, tuple[str, str]]:
    """Decision and explanation of each field that a table names, by the heading above it."""
    section = PAGE.split(f"### {title}")[1].split("\n### ")[0].split("\n## ")[0]
    found: dict[str, tuple[str, str]] = {}
    for line in re.findall(r"^\| (`.*) \|$", section, re.M):
        fields, decision, what = line.split(" | ", 2)
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", fields), (decision, what))
    return found


CHAT = rows("Chat completions")


def asked(engine: Any = None, **fields: Any) -> Record:
    request = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}], **fields}
    source = FileSource(kind="openai", path="log.jsonl", domain="chat", engine=engine, limit=None, weight=None)
    line = {"request": request, "messages": request["messages"]}
    return parse(line, "messages", source, "log.jsonl:1", timing=Timing())


@pytest.mark.parametrize("schema", [VLLM, SGLANG])
def test_every_field_of_an_engine_has_a_decision(schema: str) -> None:
    assert not {*schema.split()} - {*CHAT}


def test_every_field_of_the_messages_api_has_a_decision() -> None:
    named = {name.partition(".")[0] for name in rows("Messages API")}
    assert not {*MESSAGES_API.split()} - named


@pytest.mark.parametrize("name", CHAT)
def test_a_field_does_what_the_table_says(name: str) -> None:
    decision, what = CHAT[name]
    engine = "sglang" if name in ("reasoning", "session_params") else None
    plain, value = asked(engine), VALUES.get(name, "x")
    if decision == "left out":
        with pytest.raises(LeftOut) as caught:
            asked(engine, **{name: value})
        said = re.search(r"as `(.*?)`", what)
        assert said is None or caught.value.reason == said[1]
        return
    record = asked(engine, **{name: value})
    if decision == "kept":
        assert (record.key, record.id) != (plain.key, plain.id)
        return
    # Neither changes what the target is asked; the one is counted, the other is not.
    assert record.key == plain.key
    assert record.unfollowed == ((name,) if decision == "not followed" else ())
    assert decision in ("not followed", "no effect")


def test_reasons_that_the_page_names_are_those_that_are_counted() -> None:
    named = {" ".join(reason.split()) for reason in re.findall(r"as\s+`((?:[a-z]+\s+)+[a-z]+)`", PAGE)}
    assert named <= {*get_args(Reason)} and len(named) > 6
