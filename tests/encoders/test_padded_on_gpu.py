"""Text models that cannot be packed, on a GPU: replayed by batch size and width they give what eager stock gives."""

from __future__ import annotations

import pytest
import torch
from encoders_made import padded
from padded_made import PADDED, SEEING, made_padded

import saccade

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]
LENGTHS = [(5, 9, 1, 7, 3), (3,), (17, 12), (30, 2, 9)]
CAPTURED = ("mpnet", "deberta", "deberta-v2", "t5", "umt5")  # the others may decide things on the host


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Without TF32, whose use may differ between two batch sizes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def pair(name, dtype=torch.float32):
    """In eval mode, without dropout; gradients are captured as in training."""
    ours, theirs = made_padded(name, dtype)
    return ours.cuda(), theirs.cuda()


def batch_of(model, lengths, seed=0, device="cuda", **more):
    ids, mask = padded(lengths, model.config.pad_token_id or 0, seed=seed, **more)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def real_of(outputs, mask):
    return [x[mask.bool().to(x.device)] if x.shape[:2] == mask.shape else x for x in outputs.values() if x is not None]


def same_gradients(ours, theirs, most=5e-5, small=1e-5):
    for (where, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), where
        if x.grad is not None:
            assert error(x.grad, y.grad) < most or (x.grad - y.grad).abs().max() < small, where


def loss_of(outputs, mask):
    return sum(x.float().sin().sum() for x in real_of(outputs, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_forward(name, dtype):
    ours, theirs = pair(name, dtype)
    handle = saccade.optimize(ours)
    with torch.no_grad():
        for seed, lengths in enumerate(LENGTHS):
            batch = batch_of(ours, lengths, seed)
            want = theirs(**batch)
            got = ours(**batch)
            assert type(got) is type(want)
            assert list(got) == list(want)
            assert name not in CAPTURED or handle.served[0].last.startswith("captured"), handle.explain()
            for x, y in zip(real_of(got, batch["attention_mask"]), real_of(want, batch["attention_mask"]), strict=True):
                assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
                assert error(x, y) < (2e-5 if dtype == torch.float32 else 3e-2)
    if name in CAPTURED:
        assert "padded, replayed from CUDA graphs by batch and width; not packed: " in handle.explain()


@pytest.mark.parametrize("name", PADDED)
def test_gradients(name):
    ours, theirs = pair(name)
    handle = saccade.optimize(ours)
    for seed, lengths in enumerate(LENGTHS):
        for model in (ours, theirs):
            model.zero_grad()
            batch = batch_of(model, lengths, seed)
            loss_of(model(**batch), batch["attention_mask"]).backward()
        assert name not in CAPTURED or handle.served[0].last.startswith("captured"), handle.explain()
        same_gradients(ours, theirs)


def test_gradients_are_accumulated_under_autocast():
    ours, theirs = pair("mpnet")
    handle = saccade.optimize(ours)
    for seed, lengths in enumerate(LENGTHS):
        for model in (ours, theirs):
            batch = batch_of(model, lengths, seed)
            with torch.autocast("cuda", torch.bfloat16):
                outputs = model(**batch)
            loss_of(outputs, batch["attention_mask"]).backward()
    assert handle.served[0].last.startswith("captured")
    same_gradients(ours, theirs, most=5e-2, small=1e-2)


def test_ids_on_the_host_and_without_a_mask():
    ours, theirs = pair("mpnet")
    handle = saccade.optimize(ours)
    with torch.no_grad():
        batch = batch_of(ours, (5, 9), device="cpu")
        want = theirs(**{name: x.cuda() for name, x in batch.items()})
        for x, y in zip(real_of(ours(**batch), batch["attention_mask"]), real_of(want, batch["attention_mask"]), strict=True):
            assert error(x, y) < 2e-5
        ids = batch_of(ours, (9, 9))["input_ids"]
        assert error(ours(ids)[0], theirs(ids)[0]) < 2e-5
    assert handle.served[0].last == "captured: 2 rows in a graph of 2"


def test_padding_on_the_left_is_stock():
    ours, theirs = pair("mpnet")
    handle = saccade.optimize(ours)
    batch = batch_of(ours, (5, 9), side="left")
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
    assert "padded on the left" in handle.served[0].last


def test_a_model_that_sees_padding_is_stock(caplog):
    (name,) = SEEING
    ours, theirs = pair(name)
    handle = saccade.optimize(ours)
    batch = batch_of(ours, (5, 9))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
    assert "stock: its last_hidden_state depends on padding of mask 0" in handle.explain()
    assert caplog.text.count("depends on padding") == 1


def test_a_model_that_reads_on_the_host_is_stock(caplog):
    ours, theirs = pair("t5")

    class Reading(type(ours.encoder)):
        def forward(self, *args, **kwargs):
            kwargs["input_ids"].sum().item()
            return super().forward(*args, **kwargs)

    for model in (ours, theirs):
        model.encoder.__class__ = Reading
    handle = saccade.optimize(ours)
    batch = batch_of(ours, (5, 9))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
    assert "a CUDA graph could not be captured" in handle.explain()
    assert caplog.text.count("could not be captured") == 1
    torch.rand(3, device="cuda")  # the generator is whole


def test_dropout_differs_at_each_replay_and_follows_the_seed():
    ours, _ = made_padded("mpnet", torch.float32)
    ours.cuda().train()
    handle = saccade.optimize(ours)
    batch = batch_of(ours, (5, 9))
    ours(**batch)[0].sum().backward()
    found = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        out = ours(**batch)[0]
        found.append(out.detach().clone())
        out.sum().backward()
    assert handle.served[0].last.startswith("captured")
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_restore_frees_the_graphs():
    ours, theirs = pair("mpnet")
    batch = batch_of(ours, (5, 9))
    with saccade.optimize(ours) as handle, torch.no_grad():
        ours(**batch)
        one = handle.served[0]
        assert len(one.graphs) == 1
    assert not one.graphs
    torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
