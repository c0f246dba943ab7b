"""A tiny trained target and drafts trained on it: what comparisons with serving engines need.

Random models agree too rarely, or argmax at near ties, where two engines' arithmetic picks differently. Trained once
on one core in some 20 seconds, then read from the cache; the cache's name is a digest of everything that the
weights depend on.

Shapes: B rows, T tokens, M trained positions a row, K steps, H hidden size, A features, V vocabulary.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from byte_level import byte_level_tokenizer
from heads import DSPARK
from stand_ins import first_positions
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import draftforge
from draftforge.progress import bar
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.dflash import DFlashConfig, DFlashDraft
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.drafts.medusa import MedusaConfig, MedusaDraft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.formats import DraftMeta, load_draft, save_draft
from draftforge.specdec.kernels.document_mask import Documents, QueryMask
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target, tokenizer_digest
from draftforge.storage import lock, new_folder

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 300
REDUCED = 64
CONTEXT = 512
AUX_LAYERS = (1, 2, 3)
STEPS = 3  # of the training-time test
BLOCK, MASK_TOKEN = 6, VOCABULARY - 1
LAYER: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Heads times their size is not the hidden size, and queries share keys: what a format may get wrong."""
SEED = 20
"""Of every random choice made here."""
TARGET_STEPS, DRAFT_STEPS = 160, 80
ROWS, WINDOW = 6, 56  # of a training step

NAMES = ["Maria", "Peter", "Olga", "Henry", "Aisha", "Tomas", "Greta", "Ivan"]
ITEMS = ["lamp", "chair", "kettle", "carpet", "mirror", "basket", "candle", "ladder"]
COLOURS = ["red", "blue", "green", "yellow", "black", "white"]
CITIES = ["Lisbon", "Oslo", "Vienna", "Krakow", "Dublin", "Athens"]
PROMPTS = [
    "Order 3: Maria bought 4 red",
    "Order 12: Ivan bought",
    "The blue kettle",
    "Order 7: Greta bought 2 black ladders in Oslo. ",
    "Q",
]


class Trained(NamedTuple):
    """Folders of the target, and of a draft for each name in DRAFTS."""

    target_folder: Path
    draft_folders: dict[str, Path]

    def target(self) -> Target:
        return Target.load(TargetSettings(model=str(self.target_folder), dtype="float32", device="cpu"))

    def draft(self, name: str) -> Any:
        return load_draft(self.draft_folders[name], torch.device("cpu"), torch.float32).draft


def trained(cache: Path = ROOT / ".cache" / "tests") -> Trained:
    """From the cache; the first caller trains and the others wait for it.

    pytest calls it before the first test (`conftest.py`), where no test's timeout runs.
    """
    folder = cache / recipe_digest()
    with lock(folder.with_suffix(".lock"), timeout_seconds=3600, what="a test that trains the fixture"):
        if not folder.is_dir():
            with new_folder(folder) as beside:
                _train_all(beside)
    return Trained(folder / "target", {name: folder / name for name in DRAFTS})


def recipe_digest() -> str:
    """16 hex digits of this file, the names and shapes of all weights, and the libraries that compute."""
    target, shapes = CausalModel(_llama(layers=4)), []
    for name, make in FAMILIES.items():
        draft, _ = make(target)
        shapes += [f"{name} {key} {list(value.shape)}" for key, value in draft.state_dict().items()]
    files = [Path(__file__), Path(byte_level_tokenizer.__code__.co_filename)]
    parts = [path.read_bytes() for path in files] + [shape.encode() for shape in shapes]
    parts += [module.__version__.encode() for module in (torch, transformers, tokenizers)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def sentences(count: int, seed: int) -> str:
    """Orders that repeat their own names and numbers: a target learns to copy, a smaller draft less well."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        name, item, colour, city = (draw.choice(words) for words in (NAMES, ITEMS, COLOURS, CITIES))
        number, price = draw.randint(1, 20), draw.randint(2, 9)
        lines.append(
            f"Order {number}: {name} bought {price} {colour} {item}s in {city}. "
            f"The {colour} {item} goes to {city}, and {name} pays {price * 3} coins for order {number}.\n"
        )
    return "".join(lines)


def _train_all(folder: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so the same weights every time
    try:
        title = "the tests' tiny target and drafts, trained once"
        with torch.random.fork_rng(devices=[]), bar(title, 2, "trainings") as advance:
            torch.manual_seed(SEED)
            tokenizer = byte_level_tokenizer([sentences(200, SEED)], VOCABULARY)
            text = torch.tensor(tokenizer(sentences(3000, SEED + 1)).input_ids)
            target = train_target(text)
            target.save_pretrained(folder / "target")
            tokenizer.save_pretrained(folder / "target")
            advance(note="target")
            for name, draft in train_drafts(CausalModel(target), text).items():
                tokenizer_folder = folder / "target" if name == "small" else None
                save_draft(draft, folder / name, _meta(draft.family, tokenizer), tokenizer_folder)
            advance(note="drafts")
    finally:
        torch.set_num_threads(threads)


def train_target(text: Tensor) -> LlamaForCausalLM:
    model = _llama(layers=4)

    def loss(ids_BT: Tensor) -> Tensor:
        logits_BTV = model(ids_BT[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())

    _fit([model], loss, text, TARGET_STEPS)
    return model.eval().requires_grad_(False)


class Batch(NamedTuple):
    """Token ids, and what the target makes of them: its states, and its distribution of the token after each."""

    ids_BT: Tensor
    states: States
    teacher_BTV: Tensor


Loss = Callable[[Batch], Tensor]
"""Cross-entropy of a draft against the target's distributions, at every place that it drafts."""


def train_drafts(target: CausalModel, text: Tensor) -> dict[str, DraftModule]:
    """All drafts on the same batches, each with gradients of its own: one pass of the target teaches them all."""
    made = {name: make(target) for name, make in FAMILIES.items()}

    def loss(ids_BT: Tensor) -> Tensor:
        with torch.no_grad():
            states = target.states(ids_BT, aux_layers=AUX_LAYERS)
            batch = Batch(ids_BT, states, target.logits(states.hidden_BTH).softmax(-1))
        return torch.stack([one(batch) for _, one in made.values()]).sum()

    _fit([draft for draft, _ in made.values()], loss, text, DRAFT_STEPS, peak=6e-3)
    drafts = {name: draft.eval() for name, (draft, _) in made.items()}
    return {
        name: drafts[name] if name in drafts else _reduced(drafts[name.split("-")[0]], target, text) for name in DRAFTS
    }


def _reduced(draft: Any, target: CausalModel, text: Tensor) -> Any:
    """The same draft, of the most frequent tokens only: those rows of its head, or of the target's."""
    draft_ids = torch.bincount(text, minlength=target.vocab_size).topk(REDUCED).indices.sort().values
    head = target.model.get_output_embeddings() if draft.lm_head is None else draft.lm_head
    known = {name: value for name, value in draft.state_dict().items() if name not in ("d2t", "t2d")}
    config = draft.config.model_copy(update={"draft_vocab_size": REDUCED})
    if "markov_head.markov_w2.weight" in known:
        known["markov_head.markov_w2.weight"] = known["markov_head.markov_w2.weight"][draft_ids]
    reduced = type(draft)(config, draft_ids)
    reduced.load_state_dict({**known, "lm_head.weight": head.weight[draft_ids]}, strict=False)
    return reduced.eval()


def make_small(target: CausalModel) -> tuple[SmallDraft, Loss]:
    """Two layers."""
    draft = SmallDraft(_llama(layers=2))
    return draft, lambda batch: _cross_entropy(draft.logits(draft(batch.ids_BT)), batch.teacher_BTV)


def make_eagle3(target: CausalModel) -> tuple[Eagle3Draft, Loss]:
    """Over the steps of the training-time test."""
    config = Eagle3Config(
        **LAYER,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=AUX_LAYERS,
    )
    draft = Eagle3Draft(config)

    def loss(batch: Batch) -> Tensor:
        states = _unroll(draft, target, batch.ids_BT, batch.states.aux_BTA)
        return _steps_loss([draft.logits(state) for state in states], batch.teacher_BTV)

    return draft, loss


def make_eagle(target: CausalModel) -> tuple[EagleDraft, Loss]:
    """As EAGLE-3; the target's head reads the states. No loss on the states themselves: it is right often enough."""
    draft = EagleDraft(EagleConfig(**LAYER))

    def loss(batch: Batch) -> Tensor:
        states = _unroll(draft, target, batch.ids_BT, batch.states.hidden_BTH)
        return _steps_loss([target.logits(state) for state in states], batch.teacher_BTV)

    return draft, loss


def make_medusa(target: CausalModel) -> tuple[MedusaDraft, Loss]:
    """Five heads of one block, each from the target's own head."""
    config = MedusaConfig(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=5, num_layers=1, fc_bias=True
    )
    draft = MedusaDraft(config)
    with torch.no_grad():
        for head in draft.lm_heads:
            head.weight.copy_(target.model.get_output_embeddings().weight)  # type: ignore[operator]

    def loss(batch: Batch) -> Tensor:
        hidden_BMH = batch.states.hidden_BTH[:, : batch.ids_BT.shape[1] - config.num_heads]
        return _steps_loss([draft.logits(hidden_BMH, head) for head in range(config.num_heads)], batch.teacher_BTV)

    return draft, loss


def make_dflash(target: CausalModel, **fields: Any) -> tuple[DFlashDraft, Loss]:
    """Two layers, in blocks at every third place; `fields`: those of a DSpark draft."""
    config = DFlashConfig(
        **LAYER,
        num_hidden_layers=2,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=AUX_LAYERS,
        mask_token_id=MASK_TOKEN,
        **{"block_size": BLOCK, **fields},
    )
    draft = DFlashDraft(config)

    def loss(batch: Batch) -> Tensor:
        ids_BT = batch.ids_BT
        anchor_M = torch.arange(1 + int(torch.randint(3, ())), ids_BT.shape[1] - BLOCK, 3)
        block_BMW = torch.full((len(ids_BT), len(anchor_M), config.block_size), MASK_TOKEN)
        block_BMW[..., 0] = ids_BT[:, anchor_M]
        anchors = QueryMask(Documents.rows(ids_BT), anchor_M.expand(len(ids_BT), -1))
        assert batch.states.aux_BTA is not None
        states_BMKH = draft.drafting(draft(target.embed(block_BMW).detach(), batch.states.aux_BTA, anchors))
        place_MK, logits = anchor_M[:, None] + torch.arange(BLOCK - 1), target.logits(states_BMKH)
        teacher = batch.teacher_BTV[:, place_MK]
        if draft.markov_head is None or draft.confidence_head is None:
            return _cross_entropy(logits, teacher)

        before = draft.markov_head.embed(ids_BT[:, place_MK])
        logits = logits + draft.markov_head.bias(before)
        accepted = torch.minimum(logits.detach().softmax(-1), teacher).sum(-1)
        sure = draft.confidence_head(torch.cat([states_BMKH, before], -1))
        return _cross_entropy(logits, teacher) + F.binary_cross_entropy_with_logits(sure, accepted)

    return draft, loss


FAMILIES: dict[str, Callable[[CausalModel], tuple[DraftModule, Loss]]] = {
    "small": make_small,
    "medusa": make_medusa,
    "eagle": make_eagle,
    "eagle3": make_eagle3,
    "dflash": make_dflash,
    "dspark": lambda target: make_dflash(target, **DSPARK, block_size=BLOCK - 1),
}
"""What is trained beside the target. A new family is one function target -> (draft, loss) and one line here."""
REDUCED_DRAFTS = ("eagle3-reduced", "dflash-reduced", "dspark-reduced")
"""Those that know the most frequent tokens only."""
DRAFTS = (*FAMILIES, *REDUCED_DRAFTS)


def _llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(**LAYER, num_hidden_layers=layers, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _fit(
    modules: Sequence[nn.Module], loss: Callable[[Tensor], Tensor], text: Tensor, steps: int, peak: float = 3e-3
) -> None:
    """AdamW with a warm-up and a linear decay over random windows of the text; clips gradients module by module."""
    parameters = [one for module in modules for one in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / 20, 1 - step / steps)
        start_B1 = torch.randint(len(text) - WINDOW, (ROWS, 1))
        optimizer.zero_grad()
        loss(text[start_B1 + torch.arange(WINDOW)]).backward()  # type: ignore[no-untyped-call]
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def _unroll(
    draft: EagleDraft | Eagle3Draft, target: CausalModel, ids_BT: Tensor, features_BTA: Tensor | None
) -> list[Tensor]:
    """The draft's states [B, M, H] of each step at all positions that every step's teacher covers."""
    assert features_BTA is not None
    trained = first_positions(ids_BT, ids_BT.shape[1] - STEPS)
    return draft(target.embed(ids_BT), features_BTA, trained, STEPS)  # type: ignore[no-any-return]


def _steps_loss(logits_KBMV: list[Tensor], teacher_BTV: Tensor) -> Tensor:
    """Mean cross-entropy: step k at position i drafts the token after x_{i+1+k}."""
    width = logits_KBMV[0].shape[1]
    losses = [_cross_entropy(x, teacher_BTV[:, 1 + k : 1 + k + width]) for k, x in enumerate(logits_KBMV)]
    return torch.stack(losses).mean()


def _cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    return -(p * logits.log_softmax(-1)).sum(-1).mean()


def _meta(family: str, tokenizer: PreTrainedTokenizerFast) -> DraftMeta:
    return DraftMeta(
        family=family,  # type: ignore[arg-type]
        target_fingerprint="0" * 64,
        tokenizer_digest=tokenizer_digest(tokenizer),
        step=0,
        draft_tokens=STEPS,
        draftforge_version=draftforge.__version__,
    )
