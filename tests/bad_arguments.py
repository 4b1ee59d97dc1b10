"""Every public function with good arguments, and the values that take their places in `test_bad_arguments.py`."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import numpy
import torch
from torch.nn.attention.bias import causal_upper_left

import saccade
from saccade import analysis, distributed, nm_sparse, nn
from saccade import flash_attn_interface as flash
from saccade.integrations import doge, tabpfn, timm, transformers, triangle
from saccade.integrations.pooled import cls_only

B, H, T, D = 2, 2, 8, 8


def tensors(*names, shape=(B, H, T, D)):
    return {name: torch.randn(shape) for name in names}


def ends():
    return torch.tensor([0, 3, 8], dtype=torch.int32)


def bad_values() -> dict[str, Any]:
    """The values that may be given in any place by mistake."""
    dense = torch.randn(B, H, T, D)
    return {
        "none": None, "true": True, "text": "bad", "empty text": "", "bytes": b"x", "zero": 0, "one": 1, "three": 3, "minus one": -1,
        "huge": 2**70, "minus huge": -(2**70), "half": 0.5, "nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "complex": 1 + 0j,
        "list": [], "numbers": [1, 2], "tuple": (1, 2), "dict": {}, "object": object(), "type": int, "numpy float": numpy.float32(0.5),
        "numpy int": numpy.int64(3), "array": numpy.zeros((2, 8)), "dtype": torch.int8, "device": torch.device("meta"),
        "no dims": torch.tensor(2.0), "an int": torch.tensor(2), "vector": torch.randn(B), "ints": torch.ones(B, dtype=torch.int32),
        "far ints": torch.tensor([2**40, -5]), "other batch": torch.randn(B + 1, H, T, D), "other heads": torch.randn(B, 3, T, D),
        "other dim": torch.randn(B, H, T, 5), "rank 3": torch.randn(H, T, D), "rank 5": dense[None], "empty": torch.empty(0),
        "no rows": dense[:0], "no tokens": dense[:, :, :0], "no dim": dense[..., :0], "half precision": dense.half(), "double": dense.double(),
        "integers": dense.long(), "booleans": dense > 0, "complex numbers": dense.to(torch.complex64), "float8": dense.to(torch.float8_e5m2),
        "meta": dense.to("meta"), "sparse": dense.to_sparse(), "sparse vector": torch.ones(B, dtype=torch.int64).to_sparse(),
        "mkldnn": dense.to_mkldnn() if torch.backends.mkldnn.is_available() else dense.to_sparse(), "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor(list(dense)), "jagged": torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged),
        "masked": torch.masked.masked_tensor(dense, dense > 0), "causal bias": causal_upper_left(T, T), "transposed": dense.mT,
        "with nan": torch.full((B, H, T), math.nan), "lazy": torch.nn.parameter.UninitializedParameter(),
    }  # fmt: skip


def cache_with_a_call(**attend):
    cache = saccade.DynamicMaskCache(4)
    given = tensors("query", "key", "value") | {"key_scores": torch.randn(B, H, T)}
    with torch.no_grad():
        cache.attend(**given, **attend)
    return cache


def attend_again(**given):
    with torch.no_grad():
        return cache_with_a_call().attend(**given)


def weights(**given):
    return nm_sparse.compress(torch.randn(B, H, T, T), "1:2")


def called(make, **given):
    """A module made and called."""
    module = make(**given)
    shape = (B, T, T, given["c_in"]) if "c_in" in given else (B, T, 16)
    return module if next(module.parameters()).is_meta else module(torch.randn(shape, dtype=next(module.parameters()).dtype))


def registered(register, **given):
    with register(**given):
        pass


def encoder():
    """A tiny model that `saccade.optimize` takes."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    return BertModel(BertConfig(**sizes)).eval()


def optimized(**given):
    """The report on a model that is optimised and then restored."""
    with saccade.optimize(**given) as handle:
        return handle.explain()


def prepared(**given):
    with saccade.optimize(encoder()) as handle:
        handle.prepare(**given)


def without_a_group(function, **given):
    """A function of `saccade.distributed` where there is no process group, which no argument changes."""
    with contextlib.suppress(saccade.InvalidArgument):
        function(**given)
        raise AssertionError("there is no process group")


def replaced(**given):
    """A call of torch's function while ours stands in its place: what torch refuses raises as without us."""
    function = torch.nn.functional.scaled_dot_product_attention
    try:
        function(**given)
        theirs: tuple[type[Exception], ...] = ()
    except Exception as error:  # noqa: BLE001  whatever torch raises
        theirs = (type(error),)
    with saccade.replace_sdpa():
        try:
            torch.nn.functional.scaled_dot_product_attention(**given)
        except theirs as error:
            raise saccade.InvalidArgument(f"as torch says: {error}") from error


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """(function, good arguments) by name; every argument of a call stands there."""
    qkv = tensors("query", "key", "value")
    dense = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    of_any = {"lengths": None, "return_lse": False, "backend": "auto"}
    last = {"window": None, **of_any}
    packed = tensors("query", "key", "value", shape=(T, H, D)) | {
        "cu_seqlens_q": ends(),
        "cu_seqlens_k": ends(),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    of_packed = {
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "attn_bias": None,
        "window": None,
        "return_lse": False,
        "backend": "auto",
    }
    scores = {"key_scores": torch.randn(B, H, T)}
    dynamic = qkv | scores | {"keep": 3, "is_causal": True, "lengths": None, "document_ids": None, "cu_seqlens": None, "sinks": 0, "window": 0, "add_scores": True, "scale": None, "enable_gqa": False, "return_lse": False, "backend": "auto"}  # fmt: skip
    nm = qkv | dense | {"pattern": "2:4", "block_mask": None, "dense_first": 0, "dense_recent": 0} | of_any
    made = {"device": None, "dtype": None, "bias": True, "backend": "auto"}
    qkv_last = tensors("q", "k", "v", shape=(B, T, H, D))
    of_flash = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False}  # fmt: skip
    flash_ends = {"cu_seqlens_q": ends(), "cu_seqlens_k": ends(), "max_seqlen_q": 5, "max_seqlen_k": 5}
    matrix = torch.randn(H, T, T)
    sizes = {"head_dim": 64, "tile": 128}

    of_scores = {"document_ids": None, "cu_seqlens": None, "sinks": 0, "window": 0, "add_scores": True, "scale": None, "enable_gqa": False, "return_lse": False, "backend": "auto"}  # fmt: skip
    by_ranks = functools.partial(without_a_group, distributed.dynamic_mask_attention)
    found = {
        "optimize": (optimized, {"model": encoder(), "memory": 0.25}),
        "optimize: prepare": (prepared, {"tokens": [16], "sequences": None, "train": False}),
        "optimize: restore": (lambda **given: saccade.optimize(encoder()).__exit__(*given.values()), {"kind": None, "error": None, "traceback": None}),
        "distributed.attention": (functools.partial(without_a_group, distributed.attention), qkv | {"group": None, "is_causal": True, "scale": None}),
        "distributed.dynamic_mask_attention": (by_ranks, qkv | scores | {"keep": 3, "group": None} | of_scores),
        "distributed.head_tail": (functools.partial(without_a_group, distributed.head_tail), {"tensor": qkv["query"], "dim": 2, "group": None}),
        "tabpfn: run": (tabpfn.SaccadeBackend().run, tensors("query", "key", "value", shape=(B, T, H, D))),
        "replace_sdpa": (replaced, qkv | dense),
        "attention": (saccade.attention, qkv | dense | last | {"key_mask": None}),
        "attention with a mask of keys": (saccade.attention, qkv | dense | last | {"attn_mask": torch.randn(H, T, T), "key_mask": torch.ones(B, T, dtype=torch.bool)}),
        "attention by reference": (saccade.attention, qkv | dense | last | {"backend": "reference"}),
        "explain": (saccade.explain, qkv | dense | {"lengths": None, "window": None, "key_mask": None, "return_lse": False}),
        "triangle_attention": (triangle.triangle_attention, tensors("q", "k", "v", shape=(B, 3, H, T, D)) | {"bias": torch.randn(B, 1, H, T, T), "mask": torch.ones(B, 3, 1, 1, T, dtype=torch.bool), "scale": None, "return_aux": False}),
        "attention_qkvpacked": (saccade.attention_qkvpacked, {"qkv": torch.randn(B, T, 3, H, D), **{k: v for k, v in dense.items() if k != "enable_gqa"}, **last}),
        "attention_varlen": (saccade.attention_varlen, packed | of_packed | {"enable_gqa": False}),
        "attention_varlen_qkvpacked": (saccade.attention_varlen_qkvpacked, {"qkv": torch.randn(T, 3, H, D), "cu_seqlens": ends(), "max_seqlen": 5, **of_packed}),
        "dynamic_mask_attention": (saccade.dynamic_mask_attention, dynamic),
        "expiry": (saccade.expiry, scores | {"keep": 3, "lengths": None, "document_ids": None, "cu_seqlens": None, "sinks": 0, "window": 0}),
        "dynamic_mask_scores": (saccade.dynamic_mask_scores, {"values": torch.randn(B, T, H * D), "weight": torch.randn(H, H * D), "A": torch.randn(H), "bias": None, "form": "exp", "backend": "auto"}),
        "dynamic_mask_scores by head": (saccade.dynamic_mask_scores, {"values": qkv["value"], "weight": torch.randn(H, H * D), "A": torch.randn(H), "bias": torch.randn(H), "form": "linear", "backend": "fused"}),
        "nm_sparse_attention": (saccade.nm_sparse_attention, nm),
        "nm_sparse.scores": (nm_sparse.scores, {k: nm[k] for k in ("query", "key", "attn_mask", "is_causal", "scale", "enable_gqa", "block_mask", "backend")} | {"pattern": "1:2"}),
        "nm_sparse.compress": (nm_sparse.compress, {"dense": matrix, "pattern": "1:2", "fill": 0.0}),
        "NMWeights.to_dense": (lambda **given: weights().to_dense(**given), {"fill": 0.0}),
        "NMWeights.to_torch": (lambda **given: weights().to_torch(**given), {"batch": 0, "head": 0}),
        "NMWeights.from_torch": (nm_sparse.NMWeights.from_torch, {"sparse": weights().to_torch(0, 0), "pattern": None}),
        "NMWeights.softmax": (lambda **given: nm_sparse.scores(qkv["query"], qkv["key"], pattern="1:2").softmax(**given), {}),
        "NMWeights.matmul": (lambda **given: weights().matmul(**given), {"value": torch.randn(B, H, T, D), "enable_gqa": False}),
        "DynamicMaskCache": (saccade.DynamicMaskCache, {"keep": 3, "sinks": 0, "window": 0}),
        "cache.attend": (attend_again, qkv | scores | {"lengths": None, "scale": None, "enable_gqa": False, "add_scores": True, "backend": "auto", "padding_side": "right", "commit": True}),
        "cache.attend from the left": (attend_again, qkv | scores | {"lengths": torch.tensor([3, 8]), "padding_side": "left"}),
        "cache.commit": (lambda accepted: cache_with_a_call(commit=False).commit(accepted), {"accepted": 3}),
        "cache.reset": (lambda rows: cache_with_a_call().reset(rows), {"rows": None}),
        "cache.take_rows": (lambda rows: cache_with_a_call().take_rows(rows), {"rows": [1]}),
        "flash_attn_func": (flash.flash_attn_func, qkv_last | of_flash | {"s_aux": None}),
        "flash_attn_qkvpacked_func": (flash.flash_attn_qkvpacked_func, {"qkv": torch.randn(B, T, 3, H, D), **of_flash}),
        "flash_attn_varlen_func": (flash.flash_attn_varlen_func, tensors("q", "k", "v", shape=(T, H, D)) | flash_ends | of_flash | {"block_table": None, "s_aux": None}),
        "flash_attn_varlen_qkvpacked_func": (flash.flash_attn_varlen_qkvpacked_func, {"qkv": torch.randn(T, 3, H, D), "cu_seqlens": ends(), "max_seqlen": 5, **of_flash}),
        "nn.SelfAttention": (lambda **g: called(nn.SelfAttention, **g), {"embed_dim": 16, "num_heads": 2, "dropout": 0.0, **made}),
        "nn.SelfAttention.forward": (nn.SelfAttention(16, 2), {"x": torch.randn(B, T, 16), "lengths": None, "attn_mask": None, "is_causal": False, "cls_only": False}),
        "nn.AttentionPooling": (lambda **g: called(nn.AttentionPooling, **g), {"embed_dim": 16, "num_heads": 2, "dropout": 0.0, **made}),
        "nn.AttentionPooling.forward": (nn.AttentionPooling(16, 2), {"x": torch.randn(B, T, 16), "lengths": None}),
        "nn.DynamicMaskAttention": (lambda **g: called(nn.DynamicMaskAttention, **g), {"embed_dim": 16, "num_heads": 2, "num_kv_heads": None, "head_dim": None, "keep": 3, "sinks": 0, "window": 0, "form": "exp", "norm_eps": 1e-6, **made}),
        "nn.DynamicMaskAttention.forward": (nn.DynamicMaskAttention(16, 2, keep=3), {"hidden": torch.randn(B, T, 16), "position_embeddings": None, "lengths": None, "document_ids": None, "cache": None}),
        "nn.NystromAttention": (lambda **g: called(nn.NystromAttention, **g), {"embed_dim": 16, "num_heads": 2, "landmarks": 4, "pattern": "2:4", "iterations": 2, "conv_kernel": None, **made}),
        "nn.NystromAttention.forward": (nn.NystromAttention(16, 2, landmarks=4), {"x": torch.randn(B, T, 16), "lengths": None}),
        "nn.TriangleAttention": (lambda **g: called(nn.TriangleAttention, **g), {"c_in": 8, "c_hidden": 4, "no_heads": 2, "starting": True, "eps": 1e-5, **made}),
        "nn.TriangleAttention.forward": (nn.TriangleAttention(8, 4, 2), {"z": torch.randn(B, T, T, 8), "mask": None}),
        "nn.EncoderLayer": (lambda **g: called(nn.EncoderLayer, **g), {"d_model": 16, "nhead": 2, "dim_feedforward": 8, "dropout": 0.1, "activation": "relu", "layer_norm_eps": 1e-5, "norm_first": False, **made}),
        "nn.EncoderLayer.forward": (nn.EncoderLayer(16, 2, 8), {"x": torch.randn(B, T, 16), "attn_mask": None, "lengths": None, "is_causal": False, "cls_only": False}),
        "nn.Encoder": (lambda **g: called(nn.Encoder, **g), {"layer": nn.EncoderLayer(16, 2, 8), "num_layers": 1, "norm": None}),
        "transformers.register": (lambda **g: registered(transformers.register, **g), {"name": "saccade_fuzz", "backend": "auto"}),
        "transformers.register_nm_sparse": (lambda **g: registered(transformers.register_nm_sparse, **g), {"name": "saccade_fuzz", "pattern": "2:4", "dense_first": 0, "dense_recent": 0, "backend": "auto"}),
        "doge.register": (lambda **g: registered(doge.register, **g), {"name": "saccade_fuzz", "backend": "auto"}),
        "timm.patch": (timm.patch, {"model": nn.SelfAttention(16, 2), "skip_unknown": False}),
        "cls_only": (cls_only, {"model": nn.SelfAttention(16, 2)}),
        "kept_by_pattern": (analysis.kept_by_pattern, {"scores": matrix, "pattern": "2:4", "dense_first": 0, "dense_recent": 0}),
        "kept_by_top_k": (analysis.kept_by_top_k, {"scores": matrix, "density": 0.5}),
        "kept_by_truncation": (analysis.kept_by_truncation, {"scores": matrix, "density": 0.5}),
        "quality": (analysis.quality, {"scores": matrix, "kept": matrix > 0, "p": 1.0}),
        "top_k_quality": (analysis.top_k_quality, {"p_sigma": 1.0, "density": 0.5}),
        "fixed_quality": (analysis.fixed_quality, {"density": 0.5}),
        "one_of_two_quality": (analysis.one_of_two_quality, {"p_sigma": 1.0}),
    }  # fmt: skip
    found |= {name: (getattr(analysis, name), {"density": 0.5, **sizes}) for name in ("top_k_speedup", "fixed_speedup")}
    found |= {name: (getattr(analysis, name), sizes) for name in ("nm_speedup", "top_k_density_as_fast", "fixed_density_as_fast")}
    found |= {name: (getattr(analysis, name), {"length": 512, **sizes}) for name in ("dense_traffic", "nm_traffic")}
    found |= {
        name: (getattr(analysis, name), {"length": 512, **sizes, "features": 266})
        for name in ("performer_traffic", "performer_speedup")
    }
    return found
