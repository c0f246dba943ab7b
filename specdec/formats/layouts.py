"""Output formats of drafts: which ones take a family, and the dispatch to their writers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from transformers import PreTrainedTokenizerBase

from ...errors import InputError
from ...storage import read_object
from ..drafts.base import DraftModule
from ..drafts.dflash import DFlashDraft
from ..drafts.eagle import EagleDraft
from ..drafts.eagle3 import Eagle3Draft
from ..drafts.layers import YarnRope
from ..drafts.medusa import MedusaDraft
from ..drafts.small import SmallDraft
from ..engine_features import NAMES, ServingEngine, not_honoured
from . import dflash, eagle, eagle3, hf, medusa, speculators
from .detect import detect
from .gguf import layouts
from .gguf.file import Field
from .speculators import Verifier

Format = Literal["hf", "vllm", "sglang", "speculators", "medusa", "gguf"]
NATIVE: Format = "vllm"
"""Format that training and the registry store: every family has it, and it is lossless."""

FAMILIES: dict[Format, tuple[str, ...]] = {
    "hf": ("small",),
    "vllm": ("small", "eagle", "eagle3", "medusa", "dflash", "dspark"),
    "sglang": ("small", "eagle", "eagle3", "dflash", "dspark"),
    "speculators": ("eagle3", "dflash", "dspark"),
    "medusa": ("medusa",),
    "gguf": ("small", "eagle3", "dflash", "dspark"),
}
"""Draft families by format. `medusa`: the original project's layout; `gguf`: llama.cpp's."""
_NEED_VERIFIER = ("speculators", "medusa")
assert set(FAMILIES) == set(get_args(Format))


def known_format(name: str) -> Format:
    """The format of that name. Raises InputError listing what there is."""
    if name not in FAMILIES:
        raise InputError(f"format {name}: must be one of {', '.join(FAMILIES)}")
    return name


def check_family(name: Format, family: str) -> None:
    """Raise InputError, listing the formats that take the family, unless this one does."""
    if family not in FAMILIES[name]:
        suited = ", ".join(other for other, families in FAMILIES.items() if family in families)
        raise InputError(f"format {name}: takes no {family} draft; {family} drafts go as {suited}")


def layout_of(place: Path) -> Format:
    """Format of a draft's folder or file as an engine takes it. Raises MissingFileError or FormatError."""
    layout = detect(place)
    if layout == "gguf" or layout == "speculators":
        return layout
    # Two layouts have one file for vLLM and another one beside it.
    raw = read_object(place / "config.json")
    if layout == "eagle" and eagle.ARCHITECTURES["sglang"] in (raw.get("architectures") or []):
        return "sglang"
    if layout == "medusa" and raw.get("model_type") != "medusa":
        return "medusa"
    return NATIVE


def family_at(place: Path) -> str:
    """Family of a draft's folder or file, by its config alone. Raises MissingFileError or FormatError."""
    layout = detect(place)
    if layout == "gguf":
        return layouts.family_of(layouts.file_in(place) or place)
    if layout == "speculators":
        return str(read_object(place / "config.json")[speculators.MODEL_TYPE])
    if layout == "dflash":
        return dflash.family_of(read_object(place / "config.json"))
    return "small" if layout == "hf" else layout


def needs_verifier(name: Format) -> bool:
    """Whether a file of the format names the target (its verifier)."""
    return name in _NEED_VERIFIER


def write_draft(
    draft: DraftModule,
    folder: Path,
    name: Format,
    draft_tokens: int = 1,
    verifier: Verifier | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hints: Mapping[str, Field] | None = None,
) -> None:
    """Write config and weights of a draft into an existing folder, checked and read back.

    `draft_tokens`, `verifier` and the target's `tokenizer` are for formats that hold them; `hints` are further keys of
    a GGUF file. Raises InputError where the format takes no such draft, FormatError where it cannot hold this one or a
    tensor is missing or not finite.
    """
    # What each format needs to be told.
    check_family(name, draft.family)
    if verifier is None and needs_verifier(name):
        raise InputError(f"format {name}: names the target; give its hub id")

    # GGUF has writers of its own for all families.
    if name == "gguf":
        if tokenizer is None:
            raise InputError("format gguf: holds the target's tokenizer; give it")
        layouts.write(draft, tokenizer, folder, hints or {})
        return

    # The other formats, by family. SGLang reads vLLM's layout but for EAGLE's, and leaves out some tensors.
    sglang = name == "sglang"
    if sglang:
        _check_sglang_rope(draft)
    match draft:
        case SmallDraft():
            hf.write(draft, folder)
        case EagleDraft():
            if sglang and draft.embed_tokens is not None:
                raise _own_embeddings()
            eagle.write(draft, folder, "sglang" if sglang else "vllm")
        case Eagle3Draft():
            _check_honoured(name, "sglang" if sglang else "vllm", draft)
            if name == "speculators":
                assert verifier is not None
                speculators.write(draft, folder, draft_tokens, verifier)
                return
            # SGLang keeps a head's own embeddings where the target's do not fit it.
            if (
                sglang
                and draft.embed_tokens is not None
                and draft.config.target_hidden_size == draft.config.hidden_size
            ):
                raise _own_embeddings()
            eagle3.write(draft, folder)
        case DFlashDraft():
            if name == "speculators":
                assert verifier is not None
                speculators.write_dflash(draft, folder, draft_tokens, verifier)
                return
            if sglang:
                _check_sglang_dflash(draft)
            dflash.write(draft, folder)
        case MedusaDraft():
            if name == "medusa":
                assert verifier is not None
                medusa.write_original(draft, folder, verifier.name)
            else:
                medusa.write(draft, folder)


# What SGLang would leave out in silence, so that acceptance would drop.


def _own_embeddings() -> InputError:
    return InputError("format sglang: SGLang drafts with the target's embeddings; the draft has its own")


def _check_sglang_rope(draft: DraftModule) -> None:
    scaling = getattr(getattr(draft, "config", None), "rope_scaling", None)
    if isinstance(scaling, YarnRope) and not scaling.plain:
        raise InputError(
            f"format sglang: SGLang does not compute rope_scaling yarn with attention scaled by {scaling.stretch:g}, "
            "or with a ramp that is not truncated; vLLM does"
        )


def _check_honoured(name: Format, engine: ServingEngine, draft: Eagle3Draft) -> None:
    odd = not_honoured(engine, draft.config)
    if odd is not None:
        raise InputError(f"format {name}: {NAMES[engine]} does not compute {odd}, with which the draft was made")
    if name == "speculators" and not draft.config.aux_layers:
        raise InputError(
            "format speculators: its heads read features of layers; the draft reads the target's last state"
        )


def _check_sglang_dflash(draft: DFlashDraft) -> None:
    if draft.embed_tokens is not None or draft.lm_head is not None:
        raise InputError("format sglang: SGLang drafts with the target's embeddings and head; the draft has its own")
    if draft.config.target_hidden_size != draft.config.hidden_size:
        sizes = f"{draft.config.hidden_size} and {draft.config.target_hidden_size}"
        raise InputError(
            f"format sglang: SGLang takes a {draft.family} draft to be as wide as its target; {sizes} differ"
        )
