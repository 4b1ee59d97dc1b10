"""Tiny text encoders that cannot be packed, and models that change when a batch is filled up."""

from __future__ import annotations

import copy

import torch
import transformers
from encoders_made import SIZES

_T5 = {"vocab_size": 80, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# name -> (class, config class, numbers)
PADDED = {
    "mpnet": ("MPNetModel", "MPNetConfig", {**SIZES, "pad_token_id": 1}),
    "deberta": ("DebertaModel", "DebertaConfig", {**_DEBERTA, "max_relative_positions": -1}),
    "deberta-v2": (
        "DebertaV2Model", "DebertaV2Config",
        {**_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "t5": ("T5EncoderModel", "T5Config", _T5),
    "umt5": ("UMT5EncoderModel", "UMT5Config", _T5),
    "squeezebert": ("SqueezeBertModel", "SqueezeBertConfig", {**SIZES, "embedding_size": 32}),
    "megatron-bert": ("MegatronBertModel", "MegatronBertConfig", SIZES),
    "roformer": ("RoFormerModel", "RoFormerConfig", {**SIZES, "embedding_size": 32}),
    "ibert": ("IBertModel", "IBertConfig", {**SIZES, "pad_token_id": 1}),
}  # fmt: skip
# those whose real tokens see padding of mask 0
SEEING = {
    "convbert": ("ConvBertModel", "ConvBertConfig", {**SIZES, "embedding_size": 32}),
}


def made_padded(name, dtype=torch.float64):
    """(an encoder in eval mode, its copy)."""
    class_name, config_name, numbers = (PADDED | SEEING)[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**numbers)).to(dtype).eval()
    for x in model.parameters():  # layer norms start at 1 and 0, where a wrong one would not show
        x.data += 0.05 * torch.randn_like(x)
    return model, copy.deepcopy(model)
