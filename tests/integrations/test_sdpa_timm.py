"""Vision models of timm under `saccade.replace_sdpa`: outputs and gradients are those under torch's function."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.integrations import sdpa as integration

timm = pytest.importorskip("timm", reason="needs timm, which is not installed", exc_type=ImportError)

# family -> name, and changes that keep a model small enough for a CPU
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2}),
    "vit_with_registers": ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 112}),
    "siglip_with_attention_pooling": ("vit_base_patch16_siglip_224", {"depth": 1}),
    "deit": ("deit_tiny_distilled_patch16_224", {"depth": 2}),
    "beit": ("beit_base_patch16_224", {"depth": 1}),
    "cait": ("cait_xxs24_224", {"depth": 2}),
    "eva": ("eva02_tiny_patch14_224", {"depth": 2}),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1)}),
    "twins_pcpvt": ("twins_pcpvt_small", {}),
    "twins_svt": ("twins_svt_small", {}),
    "tiny_vit": ("tiny_vit_5m_224", {}),
    "pvt": ("pvt_v2_b0", {}),
    "hiera": ("hiera_tiny_224", {}),
    "nest": ("nest_tiny", {}),
    "volo": ("volo_d1_224", {}),
    "davit": ("davit_tiny", {}),
    "xcit": ("xcit_nano_12_p16_224", {}),
    "relpos": ("vit_relpos_small_patch16_224", {"depth": 2}),
    "sam": ("samvit_base_patch16_224", {"depth": 2}),
    "maxvit": ("maxvit_tiny_tf_224", {}),
    "visformer": ("visformer_tiny", {}),
    "fastvit": ("fastvit_sa12", {}),
}


@pytest.fixture(autouse=True)
def _fused():
    """torch's function in Swin and Visformer too, which form their scores unless they are told."""
    from timm.layers import config

    before = config._USE_FUSED_ATTN
    timm.layers.set_fused_attn(True, experimental=True)
    yield
    config._USE_FUSED_ATTN = before


def outputs(model, images):
    out = model(images)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)]


@pytest.mark.slow
@pytest.mark.unpoisoned
@pytest.mark.parametrize("family", MODELS)
def test_outputs_and_gradients(family, monkeypatch):
    name, changes = MODELS[family]
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **changes).eval()
    size = model.default_cfg["input_size"] if "img_size" not in changes else (3, changes["img_size"], changes["img_size"])
    images = torch.randn(1, *size)
    calls = []

    def count(*call):
        calls.append(call[0].shape)
        return saccade.attention(*call)

    monkeypatch.setattr(integration, "attention", count)
    theirs = F.scaled_dot_product_attention
    expected = outputs(copy.deepcopy(model), images)  # some models keep their position biases, with the graph behind them
    with saccade.replace_sdpa():
        found = outputs(model, images)
    assert F.scaled_dot_product_attention is theirs
    assert calls, f"{name} does not call torch's function"
    for got, want in zip(found, expected, strict=True):
        if want is None:
            assert got is None
            continue
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()))
