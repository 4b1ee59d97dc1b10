"""Whole training steps from CUDA graphs: the losses and parameters of stock steps that nobody captured."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import transformers
from encoders_made import SIZES, padded

import saccade

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    # the first step of a size runs uncaptured
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
]


def pair(dropout=0.0):
    torch.manual_seed(0)
    chances = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ours = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3, **chances)).cuda().train()
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("sdpa")
    return ours, theirs


def batch_of(lengths, seed=0, side="right", device="cpu"):
    ids, mask = padded(lengths, seed=seed, side=side)
    labels = torch.randint(0, 3, (len(lengths),))
    return {name: x.to(device) for name, x in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


def lengths_of(seed, rows=4, most=36):
    return torch.randint(1, most, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def step_of(model, rate=1e-3, reads=False, autocast=None):
    """A training step. A large eps: gradients that are 0 but for rounding move nothing."""
    lr = torch.tensor(rate, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3, capturable=True)

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if reads:
            loss.item()
        optimizer.step()
        return loss

    return step, optimizer.param_groups[0]["lr"]


def on_gpu(batch):
    return {name: x.cuda() for name, x in batch.items()}


def same_parameters(ours, theirs):
    for (where, x), y in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (x - y[1]).norm() < 1e-4 * y[1].norm() or (x - y[1]).abs().max() < 1e-5, where


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_over_ever_new_lengths(device):
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    (plain, lr), (want, want_lr) = step_of(ours), step_of(theirs)
    step, ran = handle.capture(plain), []
    # each number of columns and capacity comes three times at least
    for i in range(12):
        lengths = (9 + i, 30, 12 - i, 3) if i % 2 else (5, 16, 1 + i, 2)
        batch = batch_of(lengths, i, device=device)
        got, expected = step(batch), want(on_gpu(batch))
        ran.append(step.last.split(":")[0])
        assert not got.requires_grad
        assert abs(got.item() - expected.item()) < 1e-4 * abs(expected.item())
        if i == 6:
            for rate in (lr, want_lr):
                rate.mul_(0.5)
    same_parameters(ours, theirs)
    assert ran.count("captured") >= 6, ran
    assert "in a captured function" in handle.served[0].last
    assert "step: " in handle.explain()
    assert len(handle.served[0].graphs) <= 4


def test_a_batch_that_stock_has_to_see_comes_between():
    ours, theirs = pair()
    step, (want, _) = saccade.optimize(ours).capture(step_of(ours)[0]), step_of(theirs)
    for i, side in enumerate(["right", "right", "left", "right", "right"]):
        batch = batch_of((5, 9, 12, 3), i, side)
        got, expected = step(batch), want(on_gpu(batch))
        assert step.last.startswith("captured") == (i in (1, 3, 4)), (i, step.last)
        assert abs(got.item() - expected.item()) < 1e-4 * abs(expected.item())
    same_parameters(ours, theirs)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_sees_parameters_that_change(outside):
    ours, theirs = pair()
    autocast = None if outside else torch.bfloat16
    step = saccade.optimize(ours).capture(step_of(ours, 1e-2, autocast=autocast)[0])
    want, _ = step_of(theirs, 1e-2, autocast=torch.bfloat16)
    batch, losses = batch_of((5, 9, 12, 3)), []
    for _ in range(8):
        with torch.autocast("cuda", torch.bfloat16) if outside else contextlib.nullcontext():
            got = step(batch)
        expected = want(on_gpu(batch))
        losses.append(expected.item())
        assert abs(got.item() - losses[-1]) < 5e-2
    assert losses[-1] < losses[0] - 0.1  # stale weights would show
    assert step.last.startswith("captured")


def test_dropout_differs_and_follows_the_seed():
    ours, _ = pair(dropout=0.1)
    step = saccade.optimize(ours).capture(step_of(ours, rate=0.0)[0])
    batch = batch_of((5, 9, 12, 3))
    for _ in range(2):
        step(batch)
    torch.manual_seed(1)
    first, second = step(batch), step(batch)
    torch.manual_seed(1)
    assert torch.equal(step(batch), first)
    assert not torch.equal(first, second)
    assert step.last.startswith("captured")


def test_a_step_that_reads_its_loss_runs_uncaptured_and_once(caplog):
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    step, (want, _) = handle.capture(step_of(ours, reads=True)[0]), step_of(theirs)
    stream = torch.cuda.current_stream()
    for i in range(5):
        batch = batch_of((5, 9, 12, 3), i)
        got, expected = step(batch), want(on_gpu(batch))
        assert abs(got.item() - expected.item()) < 1e-4 * abs(expected.item())
        assert torch.cuda.current_stream() == stream
    same_parameters(ours, theirs)
    assert caplog.text.count("could not be captured") == 1
    assert "could not be captured" in handle.explain()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.nn.functional.dropout(torch.ones(100, device="cuda")).sum() != 100
    torch.cuda.empty_cache()
    # others are captured as before
    again = handle.capture(step_of(ours)[0])
    for _ in range(3):
        again(batch)
    assert again.last.startswith("captured"), again.last


def test_results_are_copies_and_columns_are_filled_up():
    ours, theirs = pair()
    handle = saccade.optimize(ours.eval())
    theirs.eval()

    def embed(batch):
        mask = batch["attention_mask"][..., None]
        hidden = ours.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return {"mean": ((hidden * mask).sum(1) / mask.sum(1), None, 3)}

    function, kept = handle.capture(embed), []
    with torch.inference_mode():
        for i in range(6):
            batch = batch_of((5, 9, 12 - i, 3), i)
            kept.append((function(batch)["mean"], on_gpu(batch)))
    assert function.last.startswith("captured")
    for (mean, nothing, number), batch in kept:
        mask = batch["attention_mask"][..., None]
        with torch.no_grad():
            hidden = theirs.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        torch.testing.assert_close(mean, (hidden * mask).sum(1) / mask.sum(1), rtol=1e-4, atol=1e-5)
        assert (nothing, number) == (None, 3)


def test_few_graphs_where_memory_ends():
    ours, theirs = pair()
    handle = saccade.optimize(ours, memory=1e-9)
    step, (want, _) = handle.capture(step_of(ours)[0]), step_of(theirs)
    for i in range(9):
        batch = batch_of(((5, 9), (30, 30, 30), (36,) * 6)[i % 3], i)
        assert abs(step(batch).item() - want(on_gpu(batch)).item()) < 1e-3
    assert step.last.startswith("captured")
    assert 1 <= len(handle.served[0].graphs) <= 3
    same_parameters(ours, theirs)


def test_memory_is_flat_and_restore_frees_it():
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    step = handle.capture(step_of(ours)[0])
    seen = [lengths_of(seed) for seed in range(12)]
    for i in range(400):
        step(batch_of(seen[i % 12], seed=i))
        if i == 60:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    served = handle.served[0]
    handle.restore()
    assert not served.graphs
    theirs.load_state_dict(ours.state_dict())
    batch = batch_of((5, 9, 12, 3))
    got, expected = step(batch), step_of(theirs)[0](on_gpu(batch))
    assert abs(got.item() - expected.item()) < 1e-4 * abs(expected.item())
    assert "restored" in step.last
