"""Expressions of tokenizers and adapters: searched in bounded time, or refused in one line."""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.utils.other import get_pattern_key
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.errors import DraftforgeError, FormatError, InputError
from draftforge.specdec import expressions
from draftforge.specdec.expressions import check_tokenizer_file, ids_of, matching, repeats, valued
from draftforge.specdec.loading import load_tokenizer
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import _merge_adapter, load_target_tokenizer

GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    "expression", [GPT_4O, LLAMA_3, GPT_2, r"(?:a|b)+", r"[(+*)]+", r"\(a+\)+", "(?:a+){1,3}", "(a?b)*"]
)
def test_usual_expressions_repeat_no_repeat(expression: str) -> None:
    assert not repeats(expression)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+b", r"(\w+\s?)+$", "(?:(?:a|b)*c?)*", "((a){2,})+", "(?<n>a*)*", "([^]]+[]x]*)+", "(?:a+)*?", "(a+){3,}"],
)
def test_repeated_repeats_are_found(expression: str, tmp_path: Path) -> None:
    assert repeats(expression)
    tokenizer = byte_level_tokenizer(["aaab"], 262, pre_tokenizers.ByteLevel(add_prefix_space=False))
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^here: its tokenizer's expression .* repeats a repeat"):
        load_tokenizer(tmp_path, "here")


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}

IN_BETWEEN = [
    {"type": "Replace", "pattern": pattern, "content": "a"}
    for pattern in ({"Regex": "(?=a)"}, {"Regex": "b*"}, {"Regex": "x|"}, {"Regex": r"a\K"}, {"String": ""})
]
"""Replacements whose pattern matches nothing, which take no character away."""
CHINESE = {"type": "BertNormalizer", "clean_text": False, "handle_chinese_chars": True, "lowercase": False}


def charsmap(text: str) -> str:
    """Table of a SentencePiece normalizer with an empty trie and one text."""
    return base64.b64encode(bytes(4) + text.encode() + b"\0").decode()


def around(single: list[Any]) -> dict[str, Any]:
    tokens = {"x": {"id": "x", "ids": [1] * 20, "tokens": ["a"] * 20}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def test_usual_parts_of_tokenizers_are_taken(tmp_path: Path) -> None:
    byte_level_tokenizer(["aaab"], 262).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    space = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    parts = [
        {"type": "NFKD"},
        {"type": "Lowercase"},
        {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 18)},
    ]
    stored["normalizer"] = {"type": "Sequence", "normalizers": [*parts, space]}
    stored |= {"pre_tokenizer": None, "decoder": None}
    stored["post_processor"] = around([{"SpecialToken": {"id": "x", "type_id": 0}}, TEXT])
    path.write_text(json.dumps(stored))
    check_tokenizer_file(path, "here")


def test_a_tokenizer_that_makes_long_texts_of_short_ones_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    byte_level_tokenizer(["aaab"], 262).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    token = {"id": 262, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    for change, said in (
        (
            {"normalizer": {"type": "Sequence", "normalizers": [grow] * 3}},
            "its tokenizer makes 256 characters or more of",
        ),
        *(
            (change, "its tokenizer makes 256 characters or more of")
            for change in (
                {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 9}},
                {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 3}},
                {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 300)}},
                {"normalizer": {"type": "Prepend", "prepend": "a" * 300}},
                *({"normalizer": {"type": "Sequence", "normalizers": [one] * 9}} for one in (*IN_BETWEEN, CHINESE)),
                {"decoder": {"type": "Sequence", "decoders": IN_BETWEEN[:1] * 9}},
                {"post_processor": around([TEXT] * 300)},
                {"post_processor": around([{"SpecialToken": {"id": "x", "type_id": 0}}] * 20 + [TEXT])},
            )
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a"}] * 101}},
            "its tokenizer has more than 100 parts",
        ),
        (
            {"added_tokens": [*stored["added_tokens"], token | {"content": "a" * 1500}]},
            "token of its .* has 1,500 char",
        ),
    ):
        path.write_text(json.dumps(stored | change))
        with pytest.raises(InputError, match=f"^here: .*{said}"):
            load_tokenizer(tmp_path, "here")


def _nested(parsed: Any, inside: bool = False) -> bool:
    """Whether an expression as Python parses it repeats a repeat without a bound."""
    for operation, value in parsed:
        unbounded = "REPEAT" in str(operation) and value[1] == re._constants.MAXREPEAT  # type: ignore[attr-defined]
        if unbounded and inside:
            return True
        held = value if isinstance(value, tuple | list) else ()
        below = [one for one in held if isinstance(one, re._parser.SubPattern)]  # type: ignore[attr-defined]
        below += held[1] if str(operation) == "BRANCH" else ()
        if any(_nested(one, inside or unbounded) for one in below):
            return True
    return False


@given(st.text(alphabet="ab()[]^*+?|{},12\\ds", max_size=12))
@settings(max_examples=400)
@example(" {2,}")
@example(r"[\s\r]+")
def test_replacements_add_no_more_than_they_are_counted_with(expression: str) -> None:
    replace = {"type": "Replace", "pattern": {"Regex": expression}, "content": "a"}
    try:
        normalizer = normalizers.Replace(Regex(expression), "a")
    except Exception:
        return
    assert len(normalizer.normalize_str("a b1")) <= 4 * expressions._growth(replace) + 1


@given(st.text(alphabet="ab()[]*+?|{},2", max_size=12))
@settings(max_examples=400)
def test_repeated_repeats_are_those_that_python_parses(expression: str) -> None:
    try:
        parsed = re._parser.parse(expression)  # type: ignore[attr-defined]
    except re.error:
        repeats(expression)  # which never fails
        return
    assert repeats(expression) == _nested(parsed)


def test_names_are_matched_as_python_matches_them() -> None:
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp")]
    for expression in (
        r".*\.(q|up)_proj",
        r"model\.layers\.[01]\..*",
        "mlp",
        "",
        r"model\.layers\.\d+\.mlp",
    ):
        assert matching(expression, names, "x") == [name for name in names if re.fullmatch(expression, name)]
    assert matching(r"(\w+\.?)+mlp", names, "x") == names[2::3]  # which takes Python years
    for unknown in ("(?=a)", r"(a)\1", "("):
        with pytest.raises(InputError, match="no expression that can be matched in linear time"):
            matching(unknown, names, "here")


def tiny() -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.timeout(120)
def test_expressions_of_an_adapter_take_no_time(tmp_path: Path) -> None:
    """`(\\w+\\.?)+!` on the name of a module takes Python's own matcher years."""
    model = tiny()
    lora = LoraConfig(r=2, target_modules=r".*layers\.0\..*(q|v)_proj", rank_pattern={r"layers\.0\..*q_proj": 4})
    get_peft_model(tiny(), lora).save_pretrained(tmp_path)
    merged = _merge_adapter(model, str(tmp_path))
    assert type(merged) is LlamaForCausalLM
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    for field, value in (
        ("target_modules", r"(\w+\.?)+!"),
        ("target_modules", r"(?=(\w+\.?)+!)x"),
        ("rank_pattern", {r"(\w+\.?)+!": 4}),
        ("modules_to_save", [r"(\w+\.?)+!"]),
        ("modules_to_save", ["(.|.)" * 30 + "!"]),
        ("modules_to_save", ["lm_head"] * 100),
        ("target_modules", [f"a{number}" for number in range(100_000)]),
        ("rank_pattern", {str(number): 4 for number in range(1_000)}),
        ("init_lora_weights", "pissa_niter_100000000"),
        ("layer_replication", [[0, 2]] * 1_000),
        ("layer_replication", [[0, 9]]),
        ("trainable_token_indices", [10**9]),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 1e300),
        ("alpha_pattern", {"q_proj": -1e300}),
        ("layer_replication", [[1, 1]] * 2_000),
        ("peft_type", "SHADOW"),  # which loads another model, from wherever its config says
        ("megatron_config", {"hidden_size": 1}),  # which PEFT makes by a module that the config names
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(stored | {field: value}))
        with pytest.raises(DraftforgeError, match=r"^target\.adapter: ") as caught:
            _merge_adapter(tiny(), str(tmp_path))
        assert "\n" not in str(caught.value)
    (tmp_path / "adapter_config.json").write_text(json.dumps(stored | {"lora_alpha": 10**400}))
    with pytest.raises(DraftforgeError, match=r"/adapter_config\.json: not valid JSON \(a number of 401 digits"):
        _merge_adapter(tiny(), str(tmp_path))


@pytest.mark.parametrize("expression", ["(?:.|.)*!", "(.?){40}!", "(.|.)" * 30 + "!"])
def test_ranks_by_expressions_are_those_that_peft_finds(expression: str) -> None:
    names = [f"model.layers.{i}.self_attn.{part}" for i in range(3) for part in ("q_proj", "k_proj")] + ["q_proj"]
    given: dict[str, Any] = {
        r"layers\.[01]\..*q_proj": 1,
        "q_proj|x": 3,
        "^model.layers.2.self_attn.k_proj": 4,
        r"layers\.\d+\.self_attn\.\w_proj": 2,
    }
    found = valued(given, names, "here")
    for name in names:
        assert found.get(get_pattern_key(list(found), name)) == given.get(get_pattern_key(list(given), name))
    assert valued({expression: 4}, names, "here") == {}  # which Python's own matcher would look for, for years


@pytest.mark.parametrize("table", ["", "@@@@", base64.b64encode(bytes([255] * 40)).decode()])
def test_a_tokenizer_that_its_library_gives_up_at_is_refused(tmp_path: Path, table: str) -> None:
    byte_level_tokenizer(["aaab"], 262).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(FormatError, match=r"^here: cannot be loaded: .*recompiled"):
        load_tokenizer(tmp_path, "here")


def test_a_tokenizer_that_fails_is_one_line(tmp_path: Path, tiny_target_folder: Path) -> None:
    byte_level_tokenizer(["aaab"], 262).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stored | {"model_max_length": "x"}))
    with pytest.raises(FormatError, match="its tokenizer fails: TypeError: "):
        ids_of(load_tokenizer(tmp_path, "here"), "aaab")
    folder = shutil.copytree(tiny_target_folder, tmp_path / "target")
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"extra_special_tokens": {"template_limits": "x"}}  # the name of what this project keeps there
    (folder / "tokenizer_config.json").write_text(json.dumps(stored | named))
    with pytest.raises(FormatError, match=r"cannot be loaded: ValueError: Cannot set a non-string"):
        load_target_tokenizer(TargetSettings(model=str(folder)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [1_000, 400])
def test_an_expression_that_tries_each_place_anew_is_found_out(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Cubic time: a second for 1,000 characters, hours for a page; here the time that it may take is far below that."""
    tokenizer = byte_level_tokenizer(["Hi there"], 262)
    monkeypatch.setattr(expressions._Tokenizing, "seconds", 0.0)
    monkeypatch.setattr(expressions._Tokenizing, "characters", 0)
    text = "a" * count + "!b"
    usual = ids_of(tokenizer, text)
    assert usual == tokenizer(text)["input_ids"] and expressions._Tokenizing.characters == len(text)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("a*a*[bc]"), "isolated")
    monkeypatch.setattr(expressions, "_SECONDS", 0.01)
    monkeypatch.setattr(expressions, "_SECONDS_EACH", 0.0)
    monkeypatch.setattr(expressions, "_SLICE_SECONDS", 0.02)
    with pytest.raises(
        FormatError, match=r"its tokenizer took 0 s for [\d,]+ characters: one of its expressions"
    ) as said:
        ids_of(tokenizer, text)
    assert said.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"merges": ["a b"] * (2**20 + 1)}}, "has 1,048,577 merges"),
        ({"added_tokens": [0] * (2**18 + 1)}, "has 262,145 added_tokens"),
        ({"model": {"dropout": 0.1}}, "leaves out merges by chance"),
    ],
)
def test_a_tokenizer_of_more_entries_than_any_has_or_of_chance_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(changes))
    with pytest.raises(InputError, match=rf"^here: its tokenizer {said}"):
        check_tokenizer_file(tmp_path / "tokenizer.json", "here")


@pytest.mark.parametrize("merge", ["a b", ["a", "b"], ["a"], 5])
def test_merges_at_which_the_library_would_abort_are_refused(tmp_path: Path, merge: Any) -> None:
    """It cuts as many bytes off the second part as the prefix has, whether they are there or not."""
    path = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"a": 0, "##b": 1}, "continuing_subword_prefix": "##", "merges": ["a ##b", merge]}
    path.write_text(json.dumps({"model": model}))
    with pytest.raises(
        InputError, match=r"^here: a merge of its tokenizer does not go on with continuing_subword_pref"
    ):
        check_tokenizer_file(path, "here")
    path.write_text(json.dumps({"model": model | {"merges": ["a ##b", ["a", "##b"]]}}))
    check_tokenizer_file(path, "here")
