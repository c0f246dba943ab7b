"""draftforge: train draft models for speculative decoding and pick them for serving."""

__version__ = "0.1.0"
