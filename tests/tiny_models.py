"""Tiny random models of transformers, of every type: configurations cut down by the names of their numbers, and inputs to run
them on."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

LAYERS, BATCH, TOKENS, SHORTER = 2, 2, 9, 5
MOST_PARAMETERS = 8_000_000

# the first entry that matches the end of a name applies; numbers are never raised, except the ids of tokens
_NUMBERS = (
    (r"vocab_size.*|vocabulary_size|num_embeddings", 64),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv", 2),
    (r"attention_heads|n_heads?|num_heads", 4),
    (r"hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_block|depth", LAYERS),
    (r"rotary_dim|head_dim|d_kv", 8),
    (r"lora_rank", 16),
    (r"moe_intermediate_size|expert_intermediate_size", 16),
    (r"intermediate_size|ffn_dim|d_ff|n_inner|dim_feedforward|ffn_hidden_size|mlp_dim", 48),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|embedding_dim|projection_dim|d_embed|output_dim", 32),
    (r"projection_size|encoder_dim|decoder_dim|(^|_)dim", 32),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|max_target_positions", 64),
    (r"num_experts|num_local_experts|n_routed_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|topk_group", 1),
    (r"^image_size", 16),
    (r"^patch_size", 4),
    (r"sliding_window|attention_window", 4),
)
_TOKEN_IDS = ((r"pad_token_id", 0), (r"bos_token_id|decoder_start_token_id", 1), (r"eos_token_id|sep_token_id", 2), (r".*", 3))
# changes that do not follow from the names: a hybrid needs a layer of attention among its two, and some sizes depend on others
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "glm4v_text": _SECTIONS,
    "glm_image_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_encoder": {"context_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"rope_parameters": _ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": _ROPE, "head_dim": 8},
    "hunyuan_vl_text": {"rope_parameters": _ROPE, "head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "ministral": {"rope_parameters": _ROPE, "head_dim": 8},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32, "use_bottleneck": False},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": _SECTIONS,
    "qwen2_5_omni_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "swin": {"num_heads": [2, 2], "depths": [1, 1], "embed_dim": 16, "window_size": 2},
    "segformer": {"image_size": 64},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [16, 16]},
    "vitpose_backbone": {"image_size": [256, 192]},
}


def model_types() -> list[str]:
    """Every model type with a model of its own; others describe a part of one. Decided by names alone, which imports no model."""
    tables = [getattr(modeling_auto, n) for n in vars(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING_NAMES", n)]
    return [t for t in CONFIG_MAPPING_NAMES if any(t in table for table in tables)]


def model_class(config_class: type) -> Any:
    """The plainest model of a configuration, None if it is only a part of another's."""
    names = sorted(n for n in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", n))
    for name in ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", *names):
        mapping = getattr(modeling_auto, name)
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    return None


def tiny_config(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**copy.deepcopy(_changes(config_class)))


def _changes(config_class: Any) -> dict[str, Any]:
    default = config_class()
    changed = {}
    for name, value in default.to_dict().items():
        part = vars(default).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            changed[name] = {**_changes(type(part)), "model_type": part.model_type}
        elif (
            name not in ("model_type", "transformers_version", "architectures", "dtype") and (new := _tiny(name, value)) != value
        ):
            changed[name] = new
    if "kv_lora_rank" in vars(default):
        changed["num_key_value_heads"] = 4  # latent keys are expanded to all heads
    return {**changed, **OVERRIDES.get(config_class.model_type, {})}


def _tiny(name: str, value: Any) -> Any:
    if isinstance(value, float):
        if re.search(r"drop", name):
            return 0.0
        # makes scores differ, as by default all attention weights are nearly equal
        return 0.2 if name == "initializer_range" else value
    if name in ("layer_types", "layers_block_type") and isinstance(value, list):
        kinds = list(dict.fromkeys(value))
        return (kinds * LAYERS)[:LAYERS]
    if name == "per_layer_config" and isinstance(value, dict):
        return {layer: of for layer, of in value.items() if int(layer) < LAYERS}
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [1, 1, 2]}
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_id", "token_index")):
        return next(small for rule, small in _TOKEN_IDS if re.search(rule + "$", name))
    return next((min(value, small) for rule, small in _NUMBERS if re.search(f"({rule})$", name)), value)


def make(model_type: str, attention: str) -> Any:
    """A model in eval mode, the same weights each time; on torch's meta device if it would be large."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    return model_class(type(config))._from_config(config, attn_implementation=attention).eval()


def parameters_of(model_type: str, attention: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make(model_type, attention).parameters())


def inputs_of(model: Any) -> list[dict[str, torch.Tensor]]:
    """Inputs to try, the plainest first."""
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    shared: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    text = {"input_ids": torch.randint(4, 60, (BATCH, TOKENS), generator=generator)} if "input_ids" in accepted else {}
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        text["decoder_input_ids"] = torch.randint(4, 60, (BATCH, TOKENS), generator=generator)
    config = getattr(model.config, "vision_config", model.config)
    side = getattr(config, "image_size", 16)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    frames = getattr(config, "num_frames", 2)
    channels = getattr(config, "num_channels", 3)
    mels = getattr(model.config, "num_mel_bins", None) or getattr(model.config, "feature_size", None) or 80
    shapes = {
        "pixel_values": [(BATCH, channels, height, width), (BATCH, frames, channels, height, width)],
        "pixel_values_videos": [(BATCH, frames, channels, height, width)],
        "input_values": [(BATCH, 800), (BATCH, 128, mels)],
        "input_features": [(BATCH, mels, 128), (BATCH, 128, mels)],
    }
    others = [{n: torch.randn(s, generator=generator)} for n, each in shapes.items() if n in accepted for s in each]
    # a model of both takes either alone, if it can
    candidates = [*([text] if text else []), *others, *({**text, **other} for other in others if text)]
    return [{**shared, **candidate} for candidate in candidates]


def padding() -> torch.Tensor:
    """Key padding as a tokenizer gives it: the second row is shorter."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, SHORTER:] = 0
    return mask


def results_of(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every floating tensor that a model returns, by its path; with padding only the real tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        found = dict(_tensors(model(**inputs), ""))
    return {path: _real(x) if "attention_mask" in inputs else x for path, x in found.items()}


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[0], x[1, :SHORTER]]) if tuple(x.shape[:2]) == (BATCH, TOKENS) else x


def _tensors(found: Any, path: str) -> Any:
    if isinstance(found, torch.Tensor):
        if found.is_floating_point():
            yield path, found
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from _tensors(value, f"{path}.{name}")
    elif isinstance(found, (list, tuple)):
        for index, value in enumerate(found):
            yield from _tensors(value, f"{path}[{index}]")
