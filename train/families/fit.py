"""What several families check about target and capture; one line about the field where something does not fit.

The training knows one draft and calls its section `draft`; who knows the draft's name puts that in.
"""

from ... import fingerprint
from ...data.store import Capture
from ...errors import InputError, TokenizerMismatchError


def aux_layers_of(wanted: tuple[int, int, int] | None, total: int) -> tuple[int, int, int]:
    """The target layers that are read."""
    if wanted is None:
        return default_aux_layers(total)
    if not 1 <= wanted[0] <= wanted[-1] <= total:
        raise InputError(f"draft.aux_layers = {list(wanted)}: must be between 1 and {total}, the target's last layer")
    return wanted


def default_aux_layers(total: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer; shallow targets give what they have."""
    if total < 3:
        raise InputError(f"draft.aux_layers: the target has {total} layers, must have at least 3")
    usual = (2, total // 2, total - 3)
    return usual if usual[0] < usual[1] < usual[2] else (1, (total + 1) // 2, total)


def same_tokenizer(field: str, source: str, digest: str, capture: Capture) -> None:
    """Raise TokenizerMismatchError unless the draft from `source` reads the target's ids."""
    if digest != capture.tokenizer_digest:
        raise TokenizerMismatchError(
            f"{field}: {source}: tokenizer {fingerprint.short(digest)}, must be the target's "
            f"{fingerprint.short(capture.tokenizer_digest)}"
        )
