"""Tiny encoders of every family, and padded batches for them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 80, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 40,
}  # fmt: skip
DISTIL = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "vocab_size": 80,
    "pad_token_id": 0,
    "max_position_embeddings": 40,
}
_COUNTED = {**SIZES, "pad_token_id": 1}
# name -> (class, config class, numbers)
MODELS = {
    "bert": ("BertModel", "BertConfig", SIZES),
    "roberta": ("RobertaModel", "RobertaConfig", _COUNTED),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", _COUNTED),
    "camembert": ("CamembertModel", "CamembertConfig", _COUNTED),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTIL),
    "electra": ("ElectraModel", "ElectraConfig", {**SIZES, "embedding_size": 16}),
    "albert": ("AlbertModel", "AlbertConfig", {**SIZES, "embedding_size": 16}),
    "modernbert": (
        "ModernBertModel", "ModernBertConfig",
        {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8},
    ),
    "nomic_bert": ("NomicBertModel", "NomicBertConfig", SIZES),
    "eurobert": ("EuroBertModel", "EuroBertConfig", {**SIZES, "num_key_value_heads": 2}),
}  # fmt: skip


def made(name, **changes):
    """(an encoder in float64, the same with stock attention)."""
    class_name, config_name, numbers = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**numbers, **changes})
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="sdpa").double()
    for x in model.parameters():  # layer norms start at 1 and 0, where a wrong one would not show
        x.data += 0.05 * torch.randn_like(x)
    return model, copy.deepcopy(model)


def padded(lengths, padding=0, side="right", width=None, seed=0):
    """(ids, mask) of sentences of these lengths."""
    torch.manual_seed(seed)
    width = max(width or 0, *lengths, 1)
    ids, mask = torch.full((len(lengths), width), padding), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, where] = torch.randint(3, 80, (length,))
        mask[row, where] = 1
    return ids, mask


@pytest.fixture(params=list(MODELS))
def name(request):
    return request.param
