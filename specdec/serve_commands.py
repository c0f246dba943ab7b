"""Commands that serve a target with its draft, by the draft's plan: vLLM, SGLang, llama.cpp, transformers, and
TensorRT-LLM with a policy.

Options are those of vLLM 0.23 to 0.33, SGLang 0.5.23, llama.cpp b11549 and TensorRT-LLM 1.4. Where an engine cannot do
what the plan says (a tree, an accept rule), the command does the next best, and a note says so.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import InputError
from .formats.gguf.layouts import DRAFT_FILE
from .formats.layouts import Format
from .proposers.tree_settings import ConfidentChain, DynamicTree
from .serving_plan import ServingPlan
from .serving_policy import ServingPolicy
from .target_settings import TargetSettings

UNKNOWN_TARGET = "TARGET"
"""Stands in a command for a target of which only the fingerprint is known."""
_VLLM_METHODS = {"small": "draft_model"} | {
    method: method for method in ("eagle", "eagle3", "medusa", "dflash", "dspark")
}
_VLLM_RULES: dict[str, dict[str, str]] = {
    "greedy": {},
    "onehot": {},
    "token": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}
_SGLANG_ALGORITHMS = {"small": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"} | {
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}
_SGLANG_RULES = {
    "token": ["--speculative-use-rejection-sampling"],
    "block": ["--speculative-use-block-verification"],
}
_TENSORRT_TYPES = {"small": "Draft_Target", "eagle3": "Eagle3", "dflash": "DFlash"}
_TENSORRT_RULES: dict[str, dict[str, bool]] = {"greedy": {}, "onehot": {}, "token": {"use_rejection_sampling": True}}
_LLAMA_TYPES = {"small": "draft-simple"} | {kind: f"draft-{kind}" for kind in ("eagle3", "dflash", "dspark")}
_LOOKUP_NGRAM = 3  # longest suffix that our prompt lookup looks for


class ServeCommand(NamedTuple):
    """What starts an engine with a draft."""

    engine: str
    text: str
    """Shell command; of transformers, lines of Python."""
    notes: tuple[str, ...] = ()
    """Sentences on what the engine does otherwise than the plan says."""
    policy_text: str = ""
    """Content of the policy's file, which the command names in the draft's folder; empty: it names none."""


def serve_command(
    layout: Format,
    family: str,
    plan: ServingPlan,
    draft: str,
    target: TargetSettings | None = None,
    policy: ServingPolicy | None = None,
) -> ServeCommand:
    """Command that serves a target with a draft.

    `layout`: format of the draft's folder, each of which one engine reads. `draft`: absolute path of the folder, or its
    repository on the hub. `target` None: its place is not known, and the command has TARGET for it. `policy`: K by
    batch size, of the engine of that format; its file lies in a folder.
    """
    served = target or TargetSettings(model=UNKNOWN_TARGET)
    if policy is not None:
        return _by_policy(policy, family, plan, draft, served)
    match layout:
        case "vllm":
            return _vllm(family, plan, draft, served)
        case "speculators":
            return _speculators(plan, draft, served)
        case "sglang":
            return _sglang(family, plan, draft, served)
        case "gguf":
            return _llama(family, plan, draft, served)
        case "hf":
            return _transformers(plan, draft, served)
        case "medusa":
            return _medusa(draft)


def lookup_command(engine: str, draft_tokens: int, target: TargetSettings) -> ServeCommand:
    """Command that serves a target with prompt lookup, which needs no draft: of vLLM, SGLang or llama.cpp."""
    K = str(draft_tokens)
    if engine == "sglang":
        options = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(draft_tokens + 1)]
        options += ["--speculative-ngram-max-bfs-breadth", "1"]
        note = "SGLang keeps the n-grams of all requests in one cache, prompt lookup those of the request alone"
        return _shell("SGLang", [*_sglang_target(target), *options], [note])
    if engine == "llama.cpp":
        options = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(_LOOKUP_NGRAM)]
        options += ["--spec-ngram-simple-size-m", K]
        note = f"llama.cpp looks for the last {_LOOKUP_NGRAM} tokens alone, prompt lookup also for the last 2 and 1"
        return _shell("llama.cpp", [*_llama_target(target), *options], [note])
    settings = {"method": "ngram", "num_speculative_tokens": draft_tokens}
    settings |= {"prompt_lookup_max": _LOOKUP_NGRAM, "prompt_lookup_min": 1}
    note = "vLLM copies what follows the first occurrence, prompt lookup what follows the last one"
    return _shell("vLLM", [*_vllm_target(target), *_vllm_speculative(settings)], [note])


def plain_command(engine: str, target: TargetSettings) -> ServeCommand:
    """Command that serves a target without a draft: of vLLM, SGLang or llama.cpp."""
    if engine == "sglang":
        return _shell("SGLang", _sglang_target(target))
    if engine == "llama.cpp":
        return _shell("llama.cpp", _llama_target(target))
    return _shell("vLLM", _vllm_target(target))


def _shell(engine: str, words: Sequence[str], notes: Sequence[str] = ()) -> ServeCommand:
    return ServeCommand(engine, shlex.join(words), tuple(notes))


def _chain_note(engine: str, plan: ServingPlan) -> list[str]:
    if plan.tree is None:
        return []
    return [f"{engine} drafts no such tree: K={plan.chain_tokens}, the best chain that was measured, instead of {plan}"]


def _rule_note(engine: str, plan: ServingPlan, known: Sequence[str]) -> list[str]:
    if plan.rule in known:
        return []
    return [f"{engine} has no rule {plan.rule}, which acceptance above temperature 0 was counted under"]


def _adapter_note(target: TargetSettings) -> list[str]:
    if target.adapter is None:
        return []
    return [f"the draft is for the target with the adapter {target.adapter} merged into it: serve that"]


# --- vLLM ---
def _vllm(family: str, plan: ServingPlan, draft: str, target: TargetSettings) -> ServeCommand:
    settings = _vllm_settings(family, plan, draft, plan.chain_tokens)
    notes = [*_chain_note("vLLM", plan), *_rule_note("vLLM", plan, list(_VLLM_RULES)), *_adapter_note(target)]
    if family == "medusa":
        notes.append("vLLM serves Medusa heads up to its version 0.32")
    if family == "dspark":
        notes.append(
            "vLLM serves DSpark drafts from 0.32 on, by its V2 runner on a GPU; enable_adaptive_verification true in "
            "the speculative config lets the confidence head choose how much is verified"
        )
    return _shell("vLLM", [*_vllm_target(target), *_vllm_speculative(settings)], notes)


def _vllm_settings(family: str, plan: ServingPlan, draft: str, draft_tokens: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": _method(_VLLM_METHODS, family, "vLLM"), "model": draft}
    return settings | {"num_speculative_tokens": draft_tokens, **_VLLM_RULES.get(plan.rule, {})}


def _speculators(plan: ServingPlan, draft: str, target: TargetSettings) -> ServeCommand:
    """The folder names target and K itself; how the target is run is not in it."""
    notes = _chain_note("vLLM", plan)
    if target.revision is not None:
        notes.append(f"the format has no place for the target's revision {target.revision}: vLLM then takes the newest")
    if _VLLM_RULES.get(plan.rule) != {}:
        notes.append(f"the format has no place for rule {plan.rule}: vLLM then chooses drafts and accepts by onehot")
    return _shell("vLLM", ["vllm", "serve", draft, *_vllm_options(target)], [*notes, *_adapter_note(target)])


def _vllm_target(target: TargetSettings) -> list[str]:
    words = ["vllm", "serve", _file_or_model(target)]
    words += [] if target.revision is None else ["--revision", target.revision]
    return [*words, *_vllm_options(target)]


def _vllm_options(target: TargetSettings) -> list[str]:
    words = [] if target.context is None else ["--max-model-len", str(target.context)]
    return [*words, *(["--trust-remote-code"] if target.trust_remote_code else [])]


def _vllm_speculative(settings: dict[str, Any]) -> list[str]:
    return ["--speculative-config", json.dumps(settings, ensure_ascii=False)]


# --- SGLang ---
def _sglang(family: str, plan: ServingPlan, draft: str, target: TargetSettings) -> ServeCommand:
    algorithm = _method(_SGLANG_ALGORITHMS, family, "SGLang")
    words = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    notes: list[str] = []
    # Drafted tokens are counted with the token that they follow.
    tree = plan.tree
    if family == "dflash":
        words += ["--speculative-num-draft-tokens", str(plan.chain_tokens + 1)]
    elif family == "dspark":  # which takes the block's length from the draft
        notes.append("SGLang drafts all tokens of the block that the draft was trained with, whatever K")
        notes.append(
            "SGLANG_RAGGED_VERIFY_MODE=compact in its environment lets the confidence head choose how much is verified"
        )
    elif isinstance(tree, DynamicTree) and family != "small":
        words += ["--speculative-num-steps", str(tree.levels), "--speculative-eagle-topk", str(tree.top_k)]
        words += ["--speculative-num-draft-tokens", str(tree.nodes + 1)]
    else:
        words += ["--speculative-num-steps", str(plan.chain_tokens), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(plan.chain_tokens + 1)]
        notes += _chain_note("SGLang", plan)
    # Its own rule chooses drafts; EAGLE's chains may be drawn instead.
    rule, odd = _sglang_rule(family, plan, chain=tree is None)
    return _shell("SGLang", [*_sglang_target(target), *words, *rule], [*notes, *odd, *_adapter_note(target)])


def _sglang_rule(family: str, plan: ServingPlan, chain: bool) -> tuple[list[str], list[str]]:
    """Options of the plan's accept rule, and a note where SGLang has none for such drafts."""
    if plan.rule in _SGLANG_RULES and family in ("eagle", "eagle3") and chain:
        return _SGLANG_RULES[plan.rule], []
    if plan.rule in ("greedy", "onehot"):
        return [], []
    algorithm = _SGLANG_ALGORITHMS[family]
    return [], [f"SGLang has no rule {plan.rule} for {algorithm}: it chooses drafts and accepts by onehot"]


def _sglang_target(target: TargetSettings) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", _file_or_model(target)]
    words += [] if target.revision is None else ["--revision", target.revision]
    words += [] if target.context is None else ["--context-length", str(target.context)]
    return [*words, *(["--trust-remote-code"] if target.trust_remote_code else [])]


# --- llama.cpp ---
def _llama(family: str, plan: ServingPlan, draft: str, target: TargetSettings) -> ServeCommand:
    # A draft is cut where it was when it was measured, mostly nowhere; other versions have other defaults.
    confident = plan.tree if isinstance(plan.tree, ConfidentChain) else None
    K, p_min = (plan.chain_tokens, 0) if confident is None else (confident.levels, confident.confidence_threshold)
    words = ["-md", draft if draft.endswith(".gguf") else f"{draft}/{DRAFT_FILE}"]
    words += ["--spec-type", _method(_LLAMA_TYPES, family, "llama.cpp")]
    words += ["--spec-draft-n-max", str(K), "--spec-draft-p-min", f"{p_min:g}"]
    words += ["--spec-draft-sampling", "probabilistic"] if plan.rule == "token" else []
    notes = [] if confident else _chain_note("llama.cpp", plan)
    notes += _rule_note("llama.cpp", plan, ["greedy", "onehot", "match", "token"])
    if not Path(draft).is_absolute():
        notes.append(f"it reads the draft from disk: hf download {draft} --local-dir {draft}")
    if not _is_gguf(target):
        notes.append(
            f"{_llama_model(target)} is the target as a GGUF file (llama.cpp's convert_hf_to_gguf.py makes one)"
        )
    return _shell("llama.cpp", [*_llama_target(target), *words], [*notes, *_adapter_note(target)])


def _llama_target(target: TargetSettings) -> list[str]:
    context = [] if target.context is None else ["-c", str(target.context)]
    return ["llama-server", "-m", _llama_model(target), *context]


def _llama_model(target: TargetSettings) -> str:
    return _file_or_model(target) if _is_gguf(target) else f"{UNKNOWN_TARGET}.gguf"


def _is_gguf(target: TargetSettings) -> bool:
    return _file_or_model(target).endswith(".gguf")


# --- a policy: K by batch size, in a file that the command names ---
def _by_policy(
    policy: ServingPolicy, family: str, plan: ServingPlan, draft: str, target: TargetSettings
) -> ServeCommand:
    made = {"vllm": _vllm_policy, "sglang": _sglang_policy, "tensorrt-llm": _tensorrt_policy}[policy.engine]
    command = made(policy, family, plan, draft, target)
    # What holds for each of them.
    more = "; list larger ones in score.load.batch_sizes, a share of 0 measures them" if policy.ranges[-1][2] else ""
    notes = [f"above batch {policy.largest}, the largest that was measured, {command.engine} does not draft{more}"]
    notes += [] if plan.tree is None else [f"a policy is of chains: {plan} is not drafted"]
    return command._replace(notes=(*command.notes, *notes, *_adapter_note(target)))


def _vllm_policy(
    policy: ServingPolicy, family: str, plan: ServingPlan, draft: str, target: TargetSettings
) -> ServeCommand:
    settings = _vllm_settings(family, plan, draft, policy.most_tokens)
    settings["num_speculative_tokens_per_batch_size"] = policy.schedule
    notes = [
        "vLLM 0.32 and 0.33 read num_speculative_tokens_per_batch_size; 0.23 stops at it",
        f"with data parallelism vLLM ignores the policy, and drafts K={policy.most_tokens} at every batch size",
        "where K is 0, vLLM still passes new tokens through the draft, so that it can go on later",
    ]
    notes += _rule_note("vLLM", plan, list(_VLLM_RULES))
    words = [*_vllm_target(target), "--config", f"{draft}/{policy.file}"]
    return _shell("vLLM", words, notes)._replace(policy_text=_yaml({"speculative-config": settings}))


def _sglang_policy(
    policy: ServingPolicy, family: str, plan: ServingPlan, draft: str, target: TargetSettings
) -> ServeCommand:
    most, (rule, odd) = policy.most_tokens, _sglang_rule(family, plan, chain=True)
    words = ["--speculative-algorithm", _method(_SGLANG_ALGORITHMS, family, "SGLang")]
    words += ["--speculative-draft-model-path", draft, "--speculative-num-steps", str(most)]
    words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(most + 1)]
    words += ["--speculative-adaptive", "--speculative-adaptive-config", f"{draft}/{policy.file}", *rule]
    notes = [
        "SGLang 0.5.23 has --speculative-adaptive-config; versions without it stop at the option",
        "SGLang takes the K of the next batch size that it has a CUDA graph for",
        "with attention data parallelism, two-batch overlap or PD multiplexing SGLang ignores the policy, and drafts "
        f"K={most} at every batch size",
        *odd,
    ]
    text = json.dumps(policy.schedule, indent=2) + "\n"
    return _shell("SGLang", [*_sglang_target(target), *words], notes)._replace(policy_text=text)


def _tensorrt_policy(
    policy: ServingPolicy, family: str, plan: ServingPlan, draft: str, target: TargetSettings
) -> ServeCommand:
    # 1) The speculative config: the draft, its rule, and the layers that its files do not tell this engine.
    settings: dict[str, Any] = {"decoding_type": _method(_TENSORRT_TYPES, family, "TensorRT-LLM")}
    settings |= {"speculative_model": draft, "max_draft_len": policy.most_tokens}
    settings |= {"draft_len_schedule": policy.schedule, **_TENSORRT_RULES.get(plan.rule, {})}
    if family == "eagle3":
        settings["eagle3_layers_to_capture"] = list(policy.captured_layers)
    notes = [
        "TensorRT-LLM 1.4 reads a key of draft_len_schedule as the last batch size of its K, older versions as the "
        "first one; here both ends of each range are keys, so all read the same",
        "TensorRT-LLM's draft does not read what is emitted while drafting is off: requests that go on afterwards "
        "accept less",
        "versions of TensorRT-LLM whose configs have min_runtime_draft_len draft one token where the schedule has 0: "
        "serve without a draft there if your batches are mostly that large",
    ]
    # 2) Where it gives up for good.
    if policy.gate is not None:
        rate, rounds = policy.gate
        settings |= {"acceptance_rate_window_size": rounds, "acceptance_rate_threshold": round(rate, 4)}
        notes.append(
            f"once less than {rate:.1%} of drafted tokens are accepted over {rounds:,} rounds, TensorRT-LLM drafts "
            "no more until it is started again; acceptance_rate_threshold and acceptance_rate_window_size are of 1.4: "
            "take both out for older versions, which stop at them"
        )
    # 3) The command.
    words = ["trtllm-serve", _file_or_model(target), "--config", f"{draft}/{policy.file}"]
    words += [] if target.context is None else ["--max_seq_len", str(target.context)]
    words += ["--trust_remote_code"] if target.trust_remote_code else []
    if target.revision is not None:
        notes.append(f"the command has no place for the target's revision {target.revision}")
    notes += _rule_note("TensorRT-LLM", plan, list(_TENSORRT_RULES))
    text = _yaml({"speculative_config": settings})
    return _shell("TensorRT-LLM", words, notes)._replace(policy_text=text)


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None)


# --- others ---
def _transformers(plan: ServingPlan, draft: str, target: TargetSettings) -> ServeCommand:
    """Assisted generation; the draft's generation_config.json holds K."""
    lines = [
        "from transformers import AutoModelForCausalLM",
        f"target = AutoModelForCausalLM.from_pretrained({target.model!r})",
        f"draft = AutoModelForCausalLM.from_pretrained({draft!r})",
        "target.generate(**inputs, assistant_model=draft)",
    ]
    known = ["greedy", "token", "match"]
    notes = [*_chain_note("transformers", plan), *_rule_note("transformers", plan, known), *_adapter_note(target)]
    return ServeCommand("transformers", "\n".join(lines), tuple(notes))


def _medusa(draft: str) -> ServeCommand:
    note = "the original project's program, which drafts its own tree"
    return _shell("Medusa", ["python", "-m", "medusa.inference.cli", "--model", draft], [note])


def _method(known: dict[str, str], family: str, engine: str) -> str:
    if family not in known:
        raise InputError(f"{family}: {engine} serves no such draft; it serves {', '.join(known)}")
    return known[family]


def _file_or_model(target: TargetSettings) -> str:
    return target.model if target.gguf_file is None else f"{target.model}/{target.gguf_file}"
