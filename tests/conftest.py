"""Fixtures for every test: a tiny target, the real one, and runs on several ranks. No test reaches a network."""

import gc
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests run on CPUs; name a device for those that ask for a GPU
if not os.environ["CUDA_VISIBLE_DEVICES"]:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["DRAFTFORGE_DEBUG"] = ""

import hypothesis
import pytest
import torch
from byte_level import byte_level_tokenizer
from forked import returning, run_ranks
from frozen import frozen
from interpreted import quick_interpreter
from trained import Trained, trained
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from unsynced import unsynced

import draftforge.registry  # noqa: F401  says how much MLflow prints, before a test imports that
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

hypothesis.settings.register_profile(  # how long an example takes says what else the machine does
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
unsynced()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children

ROOT = Path(__file__).resolve().parent.parent
REAL_TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
TINY_VOCABULARY = 300
CHAT_TEMPLATE = """\
{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}\
{% endif %}"""
TINY_TEXT = [
    "The order has shipped and will arrive on Monday.",
    "How do I reset my password? Open the settings and choose reset.",
    "Write a function that adds two numbers and returns the sum.",
    "What is the capital of the country? The capital is a large city.",
]

RunDistributed = Callable[..., list[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first: a long one that begins last keeps one process waiting for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection() -> None:
    """Imports make no garbage: collections meanwhile look through half a million objects in vain."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Train what tests share before the first one starts: on a slow machine it would use up that test's timeout.

    Modules are left out of what is collected from here on: each training collects, and would go through all of them.
    """
    quick_interpreter()
    frozen()
    gc.enable()
    wanted = any("trained_drafts" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        capture = session.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            trained()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens with a chat template and no pad token."""
    fast = byte_level_tokenizer(TINY_TEXT, TINY_VOCABULARY)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama whose distributions are far from uniform (wide initialisation)."""
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.16,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def make_tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`make_tiny_target(seed)`: a new folder with a tiny target; another seed gives other weights."""

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp("tiny-target")
        tiny_model(seed).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_target_folder(make_tiny_target: Callable[[int], Path]) -> Path:
    """A tiny target as a Hugging Face folder. Shared by the session: copy it before changing it."""
    return make_tiny_target(0)


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> Target:
    """The tiny target, loaded once a file of tests."""
    return Target.load(TargetSettings(model=str(tiny_target_folder), device="cpu"))


@pytest.fixture(scope="session")
def trained_drafts() -> Trained:
    """A tiny trained target and drafts trained on it, from the cache, where `pytest_collection_finish` put them."""
    return trained()


@pytest.fixture(scope="session")
def real_target() -> Path:
    """The folder of SmolLM2-135M-Instruct, float32. Tests that use it carry the marker `real`."""
    if not (REAL_TARGET / "model.safetensors").is_file():
        pytest.skip("no SmolLM2-135M-Instruct here: `make target` fetches it")
    return REAL_TARGET


@pytest.fixture(scope="session")
def run_distributed(tmp_path_factory: pytest.TempPathFactory) -> RunDistributed:
    """`run_distributed(__file__, "function", world_size, args)`: what the function returned on each gloo rank."""

    def run(
        fn_module: str | Path, fn_name: str, world_size: int = 2, args: Sequence[Any] = (), timeout_seconds: float = 120
    ) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        call = [str(folder), str(fn_module), fn_name, *json.loads(json.dumps(list(args), default=str))]
        ended = run_ranks(returning, call, folder, world_size, timeout_seconds, until_failure=True)
        if any(rank.code != 0 for rank in ended):
            logs = "\n".join(f"--- rank {number}\n{rank.said[-4000:]}" for number, rank in enumerate(ended))
            pytest.fail(f"ranks ended with {[rank.code for rank in ended]} (None: still running, killed)\n{logs}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]

    return run
