"""Draft checkpoints on disk: `save_draft` and `load_draft` for every family. Safetensors and JSON only."""

from .checkpoint import META_FILE, Draft, DraftMeta, LoadedDraft, load_draft, read_meta, save_draft

__all__ = ["META_FILE", "Draft", "DraftMeta", "LoadedDraft", "load_draft", "read_meta", "save_draft"]
