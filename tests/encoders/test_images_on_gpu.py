"""Optimised towers of images on a GPU: replayed by batch size, in inference and in training, they give what eager stock gives."""

from __future__ import annotations

import copy

import pytest
import torch
from images_made import IMAGES, JOINT, made_joint, made_tower, pixels, texts

import saccade

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]
ROWS = [3, 1, 9, 17, 4, 1]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Without TF32, whose use may differ between two batch sizes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def pair(name="vit", dtype=torch.float32, train=False, **changes):
    ours, theirs = made_tower(name, **changes)
    return ours.to("cuda", dtype).train(train), theirs.to("cuda", dtype).train(train)


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def same_gradients(ours, theirs, most=2e-5, small=1e-6):
    for (where, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), where
        if x.grad is not None:
            assert x.grad.dtype == y.grad.dtype
            assert error(x.grad, y.grad) < most or (x.grad - y.grad).abs().max() < small, where


def is_fused(handle, fuse=True):
    """A compiler that fails leaves the layers as they are, with the same results."""
    for one in handle.served:
        assert (one.fusion is not None) == fuse
        assert not fuse or not one.fusion.failed, one.fusion.failed


def loss_of(model, images):
    out = model(pixel_values=images)
    return out.last_hidden_state.float().square().mean() + out.pooler_output.float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", IMAGES)
def test_forward(name, fuse, dtype):
    ours, theirs = pair(name, dtype)
    handle = saccade.optimize(ours, fuse=fuse)
    with torch.no_grad():
        for seed, rows in enumerate(ROWS):
            images = pixels(rows, seed)
            want = theirs(pixel_values=images.cuda())
            for given in (images, images.pin_memory(), images.cuda(), images.cuda().to(dtype)):
                got = ours(pixel_values=given)
                assert handle.served[0].last.startswith("captured")
                assert type(got) is type(want)
                assert list(got) == list(want)
                for x, y in zip(got.values(), want.values(), strict=True):
                    assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
                    assert error(x, y) < (2e-5 if dtype == torch.float32 else 3e-2)
    is_fused(handle, fuse)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", IMAGES)
def test_gradients_over_ragged_batches(name, fuse):
    ours, theirs = pair(name, train=True)
    handle = saccade.optimize(ours, fuse=fuse)
    for seed, rows in enumerate(ROWS):
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, pixels(rows, seed).cuda()).backward()
        assert handle.served[0].last.startswith("captured")
        same_gradients(ours, theirs)
    is_fused(handle, fuse)


@pytest.mark.parametrize("read", ["last_hidden_state", "pooler_output"])
@pytest.mark.parametrize("name", IMAGES)
def test_an_output_that_no_loss_reads_leaves_its_parameters_without_gradients(name, read):
    ours, theirs = pair(name, train=True)
    saccade.optimize(ours)
    for model in (ours, theirs):
        model(pixel_values=pixels(3).cuda())[read].square().mean().backward()
    same_gradients(ours, theirs)


def test_frozen_layers_have_no_gradient():
    ours, theirs = pair(train=True)
    handle = saccade.optimize(ours)
    for model in (ours, theirs):  # only the pooler is trained, so one output has no gradient to give
        model.requires_grad_(False)
        model.pooler.requires_grad_(True)
        out = model(pixel_values=pixels(3).cuda())
        assert not out.last_hidden_state.requires_grad
        out.pooler_output.square().mean().backward()
    assert handle.served[0].last.startswith("captured")
    same_gradients(ours, theirs)


def test_gradients_are_accumulated_and_stay():
    ours, theirs = pair(train=True)
    saccade.optimize(ours)
    for seed, rows in enumerate((3, 3, 7)):
        for model in (ours, theirs):
            loss_of(model, pixels(rows, seed).cuda()).backward()
    same_gradients(ours, theirs)
    held = ours.layernorm.weight.grad
    before = held.clone()
    ours.zero_grad(set_to_none=True)
    loss_of(ours, pixels(3, 9).cuda()).backward()
    assert torch.equal(held, before)


def test_two_forwards_before_one_backward():
    ours, theirs = pair(train=True)
    saccade.optimize(ours)
    for model in (ours, theirs):
        first, second = (model(pixel_values=pixels(3, seed).cuda()).pooler_output for seed in (0, 1))
        (first * second).sum().backward()
    same_gradients(ours, theirs, most=5e-5)


@pytest.mark.parametrize("name", IMAGES)
def test_autocast(name):
    ours, theirs = pair(name, train=True)
    handle = saccade.optimize(ours)
    for seed in range(3):
        with torch.no_grad():  # as an optimiser would
            for model in (ours, theirs):
                for x in model.parameters():
                    x.mul_(1.01)
        for model in (ours, theirs):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, pixels(3, seed).cuda())
            loss.backward()
        assert handle.served[0].last.startswith("captured")
        same_gradients(ours, theirs, most=8e-2, small=1e-3)
    is_fused(handle)


def test_dropout_follows_the_seed():
    ours, _ = pair(train=True, hidden_dropout_prob=0.2)
    saccade.optimize(ours)
    images = pixels(3).cuda()
    ours(pixel_values=images)
    torch.manual_seed(1)
    first, second = (ours(pixel_values=images)[0].detach() for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(ours(pixel_values=images)[0], first)
    assert not torch.equal(first, second)


def test_beyond_the_largest_size_and_what_is_refused_is_stock():
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    with torch.no_grad():
        images = pixels(257).cuda()
        assert error(ours(images)[0], theirs(images)[0]) < 2e-5
        assert "257" in handle.served[0].last
    images = pixels(2).cuda().requires_grad_()
    loss_of(ours, images).backward()
    assert images.grad is not None
    with pytest.raises(ValueError, match="size"):  # what stock raises, and no reason to give graphs up
        ours(pixels(2, side=24).cuda())
    with torch.no_grad():
        ours(pixels(2).cuda())
    assert handle.served[0].last.startswith("captured")


def test_a_row_that_is_not_finite_does_not_stay():
    ours, theirs = pair(train=True)
    saccade.optimize(ours)
    loss_of(ours, torch.full((4, 3, 16, 16), float("nan"), device="cuda")).backward()
    for model in (ours, theirs):
        model.zero_grad()
        loss_of(model, pixels(3).cuda()).backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("name", JOINT)
def test_both_towers(name):
    ours, theirs = (x.cuda().train() for x in made_joint(name))
    handle = saccade.optimize(ours)
    for seed in range(3):
        ids, mask = (x.cuda() for x in texts(3, seed))
        for model in (ours, theirs):
            model.zero_grad()
            out = model(input_ids=ids, attention_mask=mask, pixel_values=pixels(3, seed).cuda())
            (out.logits_per_image.square().mean() + out.text_embeds.sum()).backward()
        assert all(one.last.startswith("captured") for one in handle.served)
        same_gradients(ours, theirs, most=1e-4, small=1e-5)
    is_fused(handle)
    with torch.no_grad():
        ids = texts(3)[0].cuda()
        for one in (ours, theirs):
            one.eval()
        assert error(ours.text_model(input_ids=ids)[0], theirs.text_model(input_ids=ids)[0]) < 2e-5


def test_results_are_copies_and_inference_mode_spoils_nothing():
    ours, _ = pair()
    saccade.optimize(ours)
    with torch.inference_mode():
        kept = ours(pixels(4).cuda())[0]
        before = kept.clone()
        ours(pixels(4, 1).cuda())
    assert torch.equal(kept, before)
    loss_of(ours.train(), pixels(4).cuda()).backward()
    assert ours.layernorm.weight.grad is not None


def test_memory_is_flat_over_ever_changing_batches():
    ours, _ = pair()
    handle = saccade.optimize(ours)
    handle.prepare(images=48)
    made = len(handle.served[0].graphs)
    generator = torch.Generator().manual_seed(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for step in range(600):
            ours(pixels(int(torch.randint(1, 49, (1,), generator=generator)), step).cuda())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert len(handle.served[0].graphs) == made


def test_deepcopy_and_restore():
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    images = pixels(3).cuda()
    with torch.no_grad():
        ours(images)
        other = copy.deepcopy(ours)
        for x in other.parameters():
            x.mul_(1.5)
        assert error(other(images)[0], ours(images)[0]) > 1e-3
        handle.restore()
        assert not handle.active
        assert error(ours(images)[0], theirs(images)[0]) < 2e-5
    assert "forward" not in ours.__dict__


def test_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7).cuda()
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    for rows in (3, 1, 9):
        for model in (ours, theirs):
            model.zero_grad()
            model(pixels(rows, side=32).cuda()).square().mean().backward()
        assert handle.served[0].last.startswith("captured")
        same_gradients(ours, theirs, most=1e-4)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_of_the_host_may_be_changed_when_the_call_returns(pinned):
    ours, theirs = pair()
    saccade.optimize(ours)
    batch = torch.empty(64, 3, 16, 16, pin_memory=pinned)
    with torch.no_grad():
        for seed in range(8):
            images = pixels(64, seed)
            batch.copy_(images)
            torch.cuda._sleep(10**7)  # the copy to the GPU waits behind this
            got = ours(batch)[0]
            batch.fill_(9)
            assert error(got, theirs(images.cuda())[0]) < 2e-5


def test_a_change_of_the_model_is_seen_whether_or_not_its_old_memory_is_free(by):
    ours, theirs = pair()
    handle = saccade.optimize(ours)
    images = pixels(4).cuda()
    with torch.no_grad():
        for step in range(6):
            for model in (ours, theirs):
                weight = next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).weight
                weight.data = weight.data * 1.5  # the old memory is free, and may be another tensor's
            torch.cuda.empty_cache()
            for _ in range(3):
                assert error(ours(images)[0], theirs(images)[0]) < 2e-5, step
            assert handle.served[0].last.startswith("captured")
