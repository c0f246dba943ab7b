"""Target trace: recorded answers with the target's states and probabilities along them, from which replays start.

Shapes: B answers, T tokens of the longest with its prompt, R round starts of all answers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..cuda_graphs import running
from ..models import CausalModel, States
from ..proposers.logits import trace_level
from ..sampling_settings import SamplingSettings
from .packing import Pack, Text


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Recorded sample: a prompt and the target's own answer to it."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """Token ids of the answer, the stop token included."""
    max_new_tokens: int
    """Most tokens that the answer was allowed to have."""


class TargetTrace(NamedTuple):
    """One teacher-forced pass of the target over prompts and answers; the same for every draft that needs it."""

    answers: Sequence[RecordedAnswer]
    sampling: SamplingSettings
    pack: Pack
    states: States | None  # [B, T, ...]; None where nobody asked for features
    p_R: Tensor | None  # processed probability of the token that follows each round start; None at temperature 0
    vocab_size: int

    @property
    def nbytes(self) -> int:
        tensors = [self.pack.ids_BT, self.p_R, *(self.states or ())]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def trace_target(
    target: CausalModel,
    answers: Sequence[RecordedAnswer],
    sampling: SamplingSettings,
    aux_layers: Sequence[int] = (),
    needs_hidden_states: bool = False,
) -> TargetTrace:
    """Trace the target along answers of one sampling setting: its states, and the probability of each token.

    At temperature 0, for a draft that reads no states, nothing is run.
    """
    # Rounds start after the answer's first token, which comes from the prefill.
    texts = [Text(answer.prompt_ids + answer.answer_ids, len(answer.prompt_ids) + 1) for answer in answers]
    pack = Pack(texts, target.device)
    traced = TargetTrace(answers, sampling, pack, None, None, target.vocab_size)
    needs_states = bool(aux_layers) or needs_hidden_states
    if sampling.greedy and not needs_states:
        return traced
    # One teacher-forced pass. The state before each token gives its probability under the sampling setting.
    with running(target.device):
        states = target.states(pack.ids_BT, aux_layers=aux_layers)
        if not sampling.greedy:
            hidden_RH = pack.pick(states.hidden_BTH, -1)
            _, p_R = trace_level(pack, 0, hidden_RH, target.logits, target.vocab_size, sampling)
            traced = traced._replace(p_R=p_R)
    return traced._replace(states=states) if needs_states else traced
