"""Tiny towers of images and of texts of fixed width, and batches for them."""

from __future__ import annotations

import copy

import torch
import transformers

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 80, "max_position_embeddings": 12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 79, "projection_size": 32,
}  # fmt: skip
# name -> (class, config class, numbers)
IMAGES = {
    "vit": ("ViTModel", "ViTConfig", _SIZES),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", _SIZES),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", _SIZES),
    "dinov2": ("Dinov2Model", "Dinov2Config", {**_SIZES, "mlp_ratio": 2}),
}
JOINT = {"clip": ("CLIPModel", "CLIPConfig"), "siglip": ("SiglipModel", "SiglipConfig")}


def _made(class_name, config):
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="sdpa").eval()
    for x in model.parameters():
        x.data += 0.05 * torch.randn_like(x)
    return model, copy.deepcopy(model)


def made_tower(name, **changes):
    """(a tower, the same with stock attention), in float32."""
    class_name, config_name, numbers = IMAGES[name]
    return _made(class_name, getattr(transformers, config_name)(**{**numbers, **changes}))


def made_joint(name):
    """(a model with two towers, the same with stock attention), in float32."""
    class_name, config_name = JOINT[name]
    config = getattr(transformers, config_name)(text_config=dict(_TEXT), vision_config=dict(_SIZES), projection_dim=16)
    return _made(class_name, config)


def pixels(rows, seed=0, side=16):
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(seed))


def texts(rows, seed=0):
    """(ids, mask), padded on the right; the last real token is the end of the text."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.zeros(rows, 12, dtype=torch.long), torch.zeros(rows, 12, dtype=torch.long)
    for row, length in enumerate(torch.randint(2, 12, (rows,), generator=generator).tolist()):
        ids[row, :length] = torch.randint(3, 79, (length,), generator=generator)
        ids[row, length - 1], mask[row, :length] = 79, 1
    return ids, mask
