"""On-policy distillation: the draft answers a share of the prompts itself, and the target judges every token of it.

It meets its own mistakes in training, as it will when it drafts (GKD, Agarwal et al. 2024, arXiv 2306.13649;
DistillSpec, Zhou et al. 2024, arXiv 2310.08461). As there, no gradient goes through the sampling.

Who answers, and with which random numbers, follows from the sample and the step alone, so it is the same on any rank,
in any micro-batch and in a resumed run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from ...data.batches import Batch, collate
from ...data.split import seed_of, unit
from ...errors import DeviceMemoryError, InputError
from ...specdec.continuous_batching import PlainDecoder, QueuedRequest
from ...specdec.drafts.small import SmallDraft
from ...specdec.requests import Request
from ...specdec.sampling_settings import SamplingSettings
from ..settings import OnPolicySettings

_MOST_SLOTS = 64  # answers at a time: more would take memory from the training and save little time


class Exchange(NamedTuple):
    """A prompt and its answer: the part of a sample that `collate` reads."""

    prompt_ids: list[int]
    answer_ids: list[int]


class OwnAnswers:
    """On-policy answers: replaces recorded answers of a batch by the draft's own.

    An own answer ends with one of `stop_ids`, or as long as the recorded one: the batch never grows. Where it ends
    sooner, fewer tokens are supervised than the plan counted.
    """

    def __init__(
        self, draft: SmallDraft, stop_ids: frozenset[int], settings: OnPolicySettings, row_tokens: int
    ) -> None:
        """`row_tokens`: width of the rows into which the batches were packed."""
        self._draft, self._stop_ids, self._settings, self._row_tokens = draft, stop_ids, settings, row_tokens
        self._sampling = SamplingSettings(temperature=settings.temperature)
        self._decoders: dict[tuple[int, int], PlainDecoder] = {}

    def __call__(self, batch: Batch, samples: Sequence[int], step: int) -> Batch:
        """Batch of the samples of these indexes with some answers replaced, without signals, on the same device."""
        # Which samples are answered anew in this step.
        asked = [number for number, index in enumerate(samples) if self._chosen(index, step)]
        if batch.empty or not asked:
            return batch

        # Their recorded answers are replaced, and the batch is packed again.
        exchanges = exchanges_of(batch)
        requests = [self._request(exchanges[number], samples[number], step) for number in asked]
        for number, answer_ids in zip(asked, self._answers(batch, requests), strict=True):
            exchanges[number] = exchanges[number]._replace(answer_ids=answer_ids)
        return collate(exchanges, None, self._row_tokens).to(batch.ids_BT.device)

    def _chosen(self, index: int, step: int) -> bool:
        return unit("on policy", str(index), str(step)) < self._settings.share

    def _request(self, recorded: Exchange, index: int, step: int) -> Request:
        tokens = min(len(recorded.answer_ids), self._settings.max_new_tokens or len(recorded.answer_ids))
        seed = seed_of(index, f"on policy/{step}")
        return Request(recorded.prompt_ids, self._sampling, seed, tokens, self._stop_ids)

    def _answers(self, batch: Batch, requests: Sequence[Request]) -> list[list[int]]:
        """Answers in tokens, one a request.

        Drawn without autocast, which would keep rounded copies of weights that are about to change.
        """
        found: dict[int, list[int]] = {}
        with _eval_mode(self._draft.model):
            # Answers come in any order: each has its request's number as its name.
            decoder = self._decoder(batch)
            decoder.submit([QueuedRequest(str(number), request) for number, request in enumerate(requests)])
            while not decoder.idle:
                found.update((int(answered.name), answered.tokens) for answered in decoder.step())
        return [found[number] for number in range(len(requests))]

    def _decoder(self, batch: Batch) -> PlainDecoder:
        """Decoder for batches of about this many samples and length, kept: on a GPU it has captured graphs.

        Graphs read the weights where these lie, and training changes them in place. Sizes follow from the batch, not
        from those before it, so that a resumed run decodes in passes of the same shapes.
        """
        # Rounded up to powers of two, so that few decoders serve all batches.
        slots = min(_MOST_SLOTS, _power_of_two(len(batch.spans)))
        capacity = _power_of_two(max(place.length for place in batch.spans))
        if (slots, capacity) not in self._decoders:
            try:
                self._decoders[slots, capacity] = PlainDecoder(self._draft.lm, slots, capacity, capacity)
            except InputError as error:
                raise DeviceMemoryError(
                    f"draft.on_policy: no room to sample beside the training ({error}); lower tokens_per_step or raise "
                    "accumulation"
                ) from None
        return self._decoders[slots, capacity]


def exchanges_of(batch: Batch) -> list[Exchange]:
    """The samples that a batch was made of."""
    rows = batch.ids_BT.tolist()
    samples = [(rows[row][start : start + length], prompt) for row, start, length, prompt in batch.spans]
    return [Exchange(ids[:prompt], ids[prompt:]) for ids, prompt in samples]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, without recomputed activations; restore each module's mode afterwards."""
    recomputed = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in recomputed:
            module.training = True


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
