"""A model and its tokenizer under other ids: the same distribution of texts, and hardly a token in common."""

import copy
import json

import torch
from byte_level import SPECIAL
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def under_other_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Both shuffled alike. The tokenizer is one of `byte_level.py`, whose special tokens are shuffled too."""
    size = len(tokenizer)
    new_of = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    shuffled = copy.deepcopy(model)
    with torch.no_grad():
        for module in (shuffled.get_input_embeddings(), shuffled.get_output_embeddings()):
            module.weight[new_of] = module.weight[:size].clone()
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = fields["model"]["vocab"]
    fields["model"]["vocab"] = {text: int(new_of[token]) for text, token in vocabulary.items()}
    for added in fields["added_tokens"]:
        added["id"] = int(new_of[added["id"]])
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
    )
    shuffled.config.eos_token_id = shuffled.generation_config.eos_token_id = own.eos_token_id
    shuffled.config.bos_token_id = shuffled.generation_config.bos_token_id = own.bos_token_id
    return shuffled, own
