"""Compiled layers in CUDA graphs: as stock, forward, gradients and whole steps."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from encoders_made import SIZES, made, padded

import saccade

pytestmark = pytest.mark.gpu
LENGTHS = [(5, 9, 1, 7), (12, 12), (3,), (14, 14, 14, 9, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "eurobert", "roberta"])
def test_as_stock(name, dtype):
    """Outputs and gradients of float32 are stock's. In bfloat16 they are as near to those of float64 as stock's are."""
    ours, theirs = made(name)
    exact = copy.deepcopy(theirs.to(dtype)).cuda().double().eval()
    ours, theirs = ours.cuda().to(dtype).eval(), theirs.cuda().eval()
    with saccade.optimize(ours, fuse=True) as handle:
        one = handle.served[0]
        for lengths in LENGTHS:
            ids, mask = padded(lengths, ours.config.pad_token_id, "right", width=max(lengths) + 1)
            real = mask.bool().cuda()
            found, wanted, truth = [], [], []
            for into, model in ((found, ours), (wanted, theirs), (truth, exact)):
                with torch.no_grad():
                    into.append(model(ids.cuda(), mask.cuda())[0][real])
                model.zero_grad()
                out = model(ids.cuda(), mask.cuda())[0][real]
                (out * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
                into += [out.detach(), *[x.grad for x in model.parameters() if x.grad is not None]]
            assert one.last.startswith("captured"), one.last
            assert not one.fusion.failed
            for x, y, z in zip(found, wanted, truth, strict=True):
                if dtype == torch.float32:
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
                else:
                    assert (x - z).norm() <= 2.5 * (y - z).norm() + 1e-3 * z.norm()
        assert name == "modernbert" or one.fusion._joined


def test_a_whole_step():
    torch.manual_seed(0)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models = [transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **quiet)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    handle = saccade.optimize(models[0], fuse=True)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-3, fused=True, capturable=True) for x in models]

    def step_of(model, optimizer):
        def step(batch):
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            return loss

        return step

    ours, theirs = handle.capture(step_of(models[0], optimizers[0])), step_of(models[1], optimizers[1])
    for _ in range(5):
        ids, mask = padded((5, 9, 1, 7), 0, "right", width=9)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0, 1])}
        got = ours(batch)
        want = theirs({name: x.cuda() for name, x in batch.items()})
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert ours.last.startswith("captured")
    for x, y in zip(*[m.parameters() for m in models], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
