"""Blocks of diffusers under `saccade.replace_sdpa`: outputs and gradients are those under torch's function."""

import pytest
import torch

import saccade
from saccade.integrations import sdpa as integration

pytest.importorskip("diffusers", reason="needs diffusers, which is not installed", exc_type=ImportError)


def unet_block():
    """Self-attention, and cross-attention to a text of which one row is padded."""
    from diffusers.models.attention import BasicTransformerBlock

    block = BasicTransformerBlock(32, 4, 8, cross_attention_dim=24)
    image, text = torch.randn(2, 16, 32), torch.randn(2, 7, 24)
    # diffusers adds a mask to the scores
    mask = torch.zeros(2, 1, 7)
    mask[1, :, 4:] = -10000.0
    return block, {"hidden_states": image, "encoder_hidden_states": text}, {"encoder_attention_mask": mask}


def joint_block():
    """Text and image in one attention, as in Stable Diffusion 3."""
    from diffusers.models.attention import JointTransformerBlock

    block = JointTransformerBlock(32, 4, 8, qk_norm="rms_norm")
    inputs = {"hidden_states": torch.randn(2, 16, 32), "encoder_hidden_states": torch.randn(2, 7, 32), "temb": torch.randn(2, 32)}
    return block, inputs, {}


BLOCKS = {unet_block: [(16, 16), (16, 7)], joint_block: [(23, 23)]}


def outputs(block, inputs, rest):
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    found = block(**leaves, **rest)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found)
    return found + list(torch.autograd.grad(loss, [*leaves.values(), *block.parameters()]))


@pytest.mark.parametrize("make", BLOCKS)
def test_outputs_and_gradients(make, monkeypatch):
    calls = []

    def attention(query, key, *rest):
        calls.append((query.shape[2], key.shape[2]))
        return saccade.attention(query, key, *rest)

    monkeypatch.setattr(integration, "attention", attention)
    block, inputs, rest = make()
    expected = outputs(block, inputs, rest)
    assert not calls
    with saccade.replace_sdpa():
        found = outputs(block, inputs, rest)
    assert calls == BLOCKS[make]
    torch.testing.assert_close(found, expected)
