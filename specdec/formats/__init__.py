"""Draft checkpoints on disk, in our native layout and those of engines and other projects: safetensors, JSON and GGUF;
pickles are refused."""

from .checkpoint import META_FILE, DraftMeta, LoadedDraft, convert_draft, load_draft, meta_file, read_meta, save_draft
from .detect import Layout, detect, read_draft
from .layouts import Format, check_family, known_format, needs_verifier, write_draft
from .speculators import Verifier

__all__ = [
    "META_FILE",
    "DraftMeta",
    "Format",
    "Layout",
    "LoadedDraft",
    "Verifier",
    "check_family",
    "convert_draft",
    "detect",
    "known_format",
    "load_draft",
    "meta_file",
    "needs_verifier",
    "read_draft",
    "read_meta",
    "save_draft",
    "write_draft",
]
