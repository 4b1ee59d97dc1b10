"""`saccade.integrations.timm.patch`: timm's models with fused attention off, against the same models patched."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.errors import SaccadeError, UnsupportedProblem
from saccade.integrations import sdpa as integration
from saccade.integrations.timm import patch

TORCHS = F.scaled_dot_product_attention


@pytest.fixture
def timm():
    """timm with its fused attention off, so that every layer forms its scores itself."""
    found = pytest.importorskip("timm", reason="needs timm, which is not installed", exc_type=ImportError)
    from timm.layers import config

    before = config._USE_FUSED_ATTN
    found.layers.set_fused_attn(False)
    yield found
    config._USE_FUSED_ATTN = before


@pytest.fixture
def reached(monkeypatch):
    """The calls of `saccade.attention`: the shapes of the query and of the mask."""
    calls = []

    def attention(query, key, value, mask, *rest):
        calls.append((tuple(query.shape), None if mask is None else tuple(mask.shape)))
        return saccade.attention(query, key, value, mask, *rest)

    monkeypatch.setattr(integration, "attention", attention)
    return calls


SWIN = {"img_size": 56, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2)}
WINDOW4 = {**SWIN, "img_size": 32, "window_size": 4}
# family -> name, changes that keep it small, and what is patched
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2, "img_size": 48, "embed_dim": 32, "num_heads": 4}, {"attention.Attention": 2}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, {"swin_transformer.WindowAttention": 3}),
    "swin_v2": ("swinv2_tiny_window8_256", WINDOW4, {"swin_transformer_v2.WindowAttention": 3}),
    "swin_v2_cr": ("swinv2_cr_tiny_224", WINDOW4, {"swin_transformer_v2_cr.WindowMultiHeadAttention": 3}),
    "beit": ("beit_base_patch16_224", {"depth": 2, "img_size": 48, "embed_dim": 32, "num_heads": 4}, {"beit.Attention": 2}),
    "beit_shared_bias": (
        "beit_base_patch16_224",
        {"depth": 2, "img_size": 48, "embed_dim": 32, "num_heads": 4, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
        {"beit.Attention": 2},
    ),
    "eva": ("eva02_tiny_patch14_224", {"depth": 2, "img_size": 56, "embed_dim": 32, "num_heads": 2}, {"eva.EvaAttention": 2}),
    "relpos": (
        "vit_relpos_small_patch16_224",
        {"depth": 2, "img_size": 48, "embed_dim": 32, "num_heads": 4},
        {"vision_transformer_relpos.RelPosAttention": 2},
    ),
    "cross_vit": (
        "crossvit_9_240",
        {"embed_dim": (16, 32), "num_heads": (2, 2), "depth": ((1, 1, 0), (1, 1, 0), (1, 1, 0))},
        None,
    ),
    "tnt": (
        "tnt_s_patch16_224",
        {"depth": 1, "img_size": 32, "embed_dim": 32, "num_heads_outer": 4, "inner_dim": 16, "num_heads_inner": 2},
        {"tnt.Attention": 2},
    ),
}
LARGER = {  # nothing makes them tiny
    "max_vit": "maxvit_tiny_tf_224",
    "coatnet": "coatnet_0_224",
    "hiera": "hiera_tiny_224",
    "visformer": "visformer_tiny",
    "xcit": "xcit_nano_12_p16_224",
    "twins_pcpvt": "twins_pcpvt_small",
    "twins_svt": "twins_svt_small",
    "tiny_vit": "tiny_vit_5m_224",
    "pvt": "pvt_v2_b0",
    "nest": "nest_tiny",
    "fastvit": "fastvit_sa12",
    "nextvit": "nextvit_small",
}


def make(timm, name, noise=0.1, **changes):
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **changes).eval()
    with torch.no_grad():  # tables of biases begin at zero or near it, and layer scales near zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def images_of(model, changes, batch=2):
    size = changes.get("img_size", model.default_cfg["input_size"][-1])
    return torch.randn(batch, 3, size, size)


def outputs(model, images):
    out = model(images)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((out * weights).sum(), list(parameters.values()), allow_unused=True)
    return {"output": out, **dict(zip(parameters, gradients, strict=True))}


def compare(found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()), msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.unpoisoned
@pytest.mark.parametrize("family", MODELS)
def test_outputs_and_gradients(family, timm, reached):
    name, changes, counts = MODELS[family]
    model = make(timm, name, **changes)
    images = images_of(model, changes)
    expected = outputs(copy.deepcopy(model), images)  # some models keep their position biases, with the graph behind them
    assert not reached
    with patch(model) as report:
        assert F.scaled_dot_product_attention is TORCHS  # the process is left alone
        compare(outputs(model, images), expected)
    assert counts is None or report.counts == counts
    assert len(reached) >= sum(report.counts.values())
    assert not report.left


@pytest.mark.slow
@pytest.mark.unpoisoned
@pytest.mark.parametrize("family", LARGER)
def test_outputs_and_gradients_of_larger_models(family, timm, reached):
    # twice the digits, since these are deep, and noise in norms makes them steep
    model = make(timm, LARGER[family], noise=0.02).double()
    images = images_of(model, {}, batch=1).double()
    expected = outputs(copy.deepcopy(model), images)
    with patch(model):
        compare(outputs(model, images), expected)
    assert reached


@pytest.mark.unpoisoned
@pytest.mark.parametrize("family", ["swin", "swin_v2", "swin_v2_cr"])
def test_windows_with_and_without_shift(family, timm, reached):
    """The bias has a gradient in both, and a shifted window does not see over its edge."""
    name, changes, _ = MODELS[family]
    model = make(timm, name, **changes)
    blocks = [m for m in model.modules() if hasattr(m, "attn") and hasattr(m, "shift_size")][:2]
    shifts = [any(block.shift_size) if isinstance(block.shift_size, tuple) else bool(block.shift_size) for block in blocks]
    assert shifts == [False, True]
    area = math.prod(blocks[0].attn.window_size)
    for block, shifted in zip(blocks, shifts, strict=True):
        layer = block.attn
        count = 4 if family == "swin" else block.attn_mask.shape[0] if shifted else 4
        x = torch.randn(2 * count, area, 16, requires_grad=True)
        mask = block.attn_mask if shifted else None
        assert not shifted or (mask < 0).any()

        def run(layer=layer, x=x, mask=mask):
            out = layer(x, mask=mask)
            leaves = {"x": x, **dict(layer.named_parameters())}
            gradients = torch.autograd.grad(
                (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), list(leaves.values())
            )
            return {"output": out, **dict(zip(leaves, gradients, strict=True))}

        expected = run()
        with patch(layer):
            found = run()
        compare(found, expected)
        biases = [g for n, g in found.items() if "bias_table" in n or "cpb_mlp" in n or "meta_mlp" in n]
        assert biases
        assert all(g.abs().max() > 0 for g in biases)
        query, bias = reached.pop()
        if shifted:  # windows of two images, and a bias for each window, once
            assert (query[:2], bias) == ((2, count), (count, layer.num_heads, area, area))
        else:
            assert (query[:1], bias) == ((2 * count,), (1, layer.num_heads, area, area))


@pytest.mark.unpoisoned
def test_queries_of_the_whole_image_in_gc_vit(timm, reached):
    """Two images, so that each has to keep its own queries."""
    from timm.models.gcvit import GlobalContextVit

    torch.manual_seed(0)
    model = GlobalContextVit(
        img_size=64, window_size=(4, 2), depths=(2, 2), num_heads=(2, 2), embed_dim=16, num_classes=10
    ).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = outputs(model, images)
    with patch(model) as report:
        compare(outputs(model, images), expected)
    assert report.counts == {"gcvit.WindowAttentionGlobal": 4}
    assert [mask for _, mask in reached] == [(1, 2, 16, 16)] * 2 + [(1, 2, 4, 4)] * 2


@pytest.mark.unpoisoned
def test_class_attention_of_volo_and_convit(timm, reached):
    """Models with layers that are not known: the known ones can be had alone."""
    from timm.models import volo

    with pytest.raises(UnsupportedProblem, match=r"0 \(OutlookAttention\); skip_unknown=True"):
        patch(nn.Sequential(volo.OutlookAttention(16, 2), volo.ClassAttention(16, 2)))
    layers = {"volo": volo.ClassAttention(16, 2, qkv_bias=True).eval()}
    convit = make(timm, "convit_tiny", embed_dim=8, num_heads=4, depth=2, local_up_to_layer=1)
    layers["convit"] = next(m for m in convit.modules() if type(m).__name__ == "MHSA")
    for layer in layers.values():
        x = torch.randn(2, 9, layer.proj.in_features)
        expected = outputs(layer, x)
        with patch(layer):
            compare(outputs(layer, x), expected)
    assert len(reached) == 2
    with patch(convit, skip_unknown=True) as report:
        assert report.left == {"blocks.0.attn": "GPSA"}
        assert report.counts == {"convit.MHSA": 1}
        assert "1 left as they are" in repr(report)


@pytest.mark.unpoisoned
def test_checkpointed_blocks_and_deep_copies(timm, reached):
    name, changes, _ = MODELS["swin"]
    model = make(timm, name, **changes, drop_path_rate=0.0)
    images = images_of(model, changes)
    expected = outputs(copy.deepcopy(model), images)
    with patch(model):
        twin = copy.deepcopy(model)
        twin.set_grad_checkpointing()
        once = len(reached)
        compare(outputs(twin.train(), images), expected)
        assert len(reached) - once > 3  # blocks ran again in backward, by ours
    reached.clear()
    with torch.no_grad():
        twin(images)
    assert len(reached) == 3  # the copy stays patched


@pytest.mark.unpoisoned
def test_dropout_is_that_of_the_layer(timm):
    model = make(timm, "swin_tiny_patch4_window7_224", **SWIN, attn_drop_rate=0.5)
    layer = next(m for m in model.modules() if type(m).__name__ == "WindowAttention")
    x = torch.randn(1, 49, 16).expand(3000, -1, -1)
    with torch.no_grad(), patch(model):
        fixed = layer(x[:1])
        layer.train()
        dropped = layer(x)
    assert not torch.allclose(dropped[0], dropped[1])
    deviation = dropped.std(0)
    assert ((dropped.mean(0) - fixed[0]).abs() < 6 * deviation / math.sqrt(3000) + 1e-6).all()


@pytest.mark.unpoisoned
def test_restored(timm):
    name, changes, _ = MODELS["swin"]
    model = make(timm, name, **changes)
    kinds, names = [type(m) for m in model.modules()], list(model.state_dict())
    report = patch(model)
    layer = model.layers[0].blocks[0].attn
    assert layer.fused_attn
    assert "SaccadeWindowAttention" in str(model)
    assert list(model.state_dict()) == names
    assert repr(report) == "<patch(SwinTransformer): 3 x swin_transformer.WindowAttention>"
    with pytest.raises(SaccadeError, match="patched already"):
        patch(model)
    report.restore()
    report.restore()
    assert not report.active
    assert [type(m) for m in model.modules()] == kinds
    assert layer.fused_attn is False
    with pytest.raises(SaccadeError, match="was restored"), report:
        pass


# --- without timm: layers that call torch's function in each of the ways that are written


class Named(nn.Module):
    """Calls torch's function by the name F."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, scale=0.3)


class Longer(Named):
    """Overrides it by another name, and asks its parent."""

    def forward(self, x, *, twice=2):
        return super().forward(x) + twice * torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Inside(nn.Module):
    """Calls it in a method other than forward."""

    def forward(self, x):
        return self.attend(torch.relu(x))

    def attend(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Imported(nn.Module):
    """Took the function itself at import, where `replace_sdpa` does not reach it."""

    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


class ByHand(nn.Module):
    """Forms its scores in a way that nobody knows."""

    def forward(self, x):
        return (x @ x.transpose(-2, -1)).softmax(-1) @ x


scaled_dot_product_attention = TORCHS


@pytest.mark.parametrize(("kind", "calls"), [(Named, 1), (Longer, 2), (Inside, 1), (Imported, 1)])
def test_every_way_to_call_torchs_function(kind, calls, reached):
    model, x = nn.Sequential(kind()), torch.randn(2, 3, 5, 8)
    expected = model(x)
    with patch(model) as report:
        torch.testing.assert_close(model(x), expected)
    assert len(reached) == calls
    assert report.counts == {f"test_timm.{kind.__name__}": 1}
    model(x)
    assert len(reached) == calls


@pytest.mark.unpoisoned
def test_compiled_without_a_break():
    model, x = nn.Sequential(Longer(), Inside()), torch.randn(2, 3, 5, 8)
    expected = model(x)
    with patch(model):
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


class Doubling(nn.Module):
    """Reaches other functions by the names of the same modules."""

    def forward(self, x):
        doubled = F.scaled_dot_product_attention(x, x, x) + F.relu(x) + torch.nn.functional.elu(x).to(torch.float32)
        return torch.abs(doubled)


def test_a_later_patch_of_another_function_is_seen(monkeypatch):
    model, x = nn.Sequential(Doubling()), torch.randn(2, 3, 5, 8)
    with patch(model):
        before = model(x)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), before)
        relu = F.relu
        monkeypatch.setattr(F, "relu", lambda x: relu(x) + 100)
        assert model(x).min() > 50
        monkeypatch.setattr(torch, "abs", torch.neg)
        assert model(x).max() < -50


SCALE = 1.0


class Scaled(nn.Module):
    """Reads a global of its module."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, scale=SCALE)


def test_globals_are_those_of_the_time_of_each_patch(monkeypatch):
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(2, 3, 5, 8)
    for scale in (1.0, 0.1):
        monkeypatch.setitem(globals(), "SCALE", scale)
        expected = model(x)
        with patch(model):
            torch.testing.assert_close(model(x), expected)
            assert type(model[0]) is type(model[1])


class Overriding(Named):
    """Inherits a layer that calls torch's function, and forms its scores instead."""

    def forward(self, x):
        return ByHand.forward(self, x) + (x @ x.mT).softmax(-1) @ x


def test_a_layer_that_overrides_what_is_known_is_not_known():
    with pytest.raises(UnsupportedProblem, match=r"0 \(Overriding\)"):
        patch(nn.Sequential(Overriding()))


def test_refused_before_anything_is_changed():
    model = nn.Sequential(Named(), ByHand(), nn.Sequential(ByHand()))
    with pytest.raises(
        UnsupportedProblem, match=r"2 layers of this Sequential .*: 1 \(ByHand\), 2.0 \(ByHand\); skip_unknown=True"
    ):
        patch(model)
    assert type(model[0]) is Named
    assert patch(model, skip_unknown=True).left == {"1": "ByHand", "2.0": "ByHand"}
    with pytest.raises(UnsupportedProblem, match="no layer of timm"):
        patch(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedProblem, match="MultiheadAttention"):
        patch(nn.Sequential(Named(), nn.MultiheadAttention(8, 2)))


def test_nothing_is_restored_over_a_foreign_change():
    model = nn.Sequential(Named())
    report = patch(model)
    ours = type(model[0])
    model[0].__class__ = type("Foreign", (ours,), {})
    with pytest.raises(SaccadeError, match="is a Foreign by now"):
        report.restore()
    model[0].__class__ = ours
    report.restore()
    assert type(model[0]) is Named
