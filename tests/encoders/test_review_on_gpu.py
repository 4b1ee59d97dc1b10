"""Changes of a model between calls, and threads beside them, on a GPU: what `test_kept_memory` asks of recorded graphs, asked of CUDA's."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from encoders_made import made, padded
from torch import nn

import saccade

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]
LENGTHS = (5, 9, 3, 30)


@pytest.fixture
def served():
    """(an encoder that has replayed forward and backward, its twin, what serves it)."""
    ours, theirs = (x.to("cuda", torch.float32).eval() for x in made("bert"))
    one = saccade.optimize(ours, fuse=False).served[0]
    for _ in range(2):
        loss(ours).backward()
        with torch.no_grad():
            loss(ours)
    assert one.last.startswith("captured: ")
    ours.zero_grad()
    return ours, theirs, one


_batch = functools.cache(padded)  # drawn once: two threads would share torch's random numbers


def loss(model, lengths=LENGTHS):
    ids, mask = (x.cuda() for x in _batch(lengths))
    return model(input_ids=ids, attention_mask=mask)[0][mask.bool()].square().sum()


def same(ours, theirs, tolerance=1e-3):
    for model in (ours, theirs):
        model.zero_grad()
        loss(model).backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if y[1].grad is not None:
            assert x.grad is not None, name
            limit = tolerance * y[1].grad.norm().clamp(min=1e-2)
            assert (x.grad - y[1].grad).norm() <= limit, name


def test_review_parameters_of_the_same_memory(served):
    ours, theirs, one = served
    graphs = len(one.graphs)
    ours.load_state_dict(ours.state_dict(), assign=True)
    same(ours, theirs)
    assert len(one.graphs) == graphs, "the memory is the same, so the graphs are"


def test_review_parameters_that_move_before_backward(served):
    ours, _, _ = served
    found = loss(ours)
    for x in ours.parameters():
        x.data = x.data.clone()
    with pytest.raises(RuntimeError, match="was moved to other memory"):
        found.backward()
    loss(ours).backward()


def test_review_a_forward_of_a_part(served):
    ours, theirs, one = served
    for model in (ours, theirs):
        part = model.encoder.layer[1].output.dense
        part.forward = lambda x, stock=part.forward: 2 * stock(x)
    same(ours, theirs)
    assert "a forward of its own" in one.last


def test_review_the_precision_of_float32(served):
    ours, _, one = served
    matmul, graphs = torch.backends.cuda.matmul, len(one.graphs)
    before = matmul.fp32_precision
    with torch.no_grad():
        loss(ours)
        matmul.fp32_precision = "ieee" if before == "tf32" else "tf32"
        try:
            loss(ours)
        finally:
            matmul.fp32_precision = before
    assert len(one.graphs) == graphs + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_review_layers_that_are_computed_again(served, reentrant):
    ours, theirs, one = served
    for model in (ours, theirs):
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same(ours, theirs)
    assert one.last.startswith("stock: gradient checkpointing")


def test_review_threads_under_another_autocast(served):
    """Each thread gets results of its own dtype while the other alternates graphs with it."""
    ours, theirs, _ = served
    wrong = []

    def work(enabled):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            want = loss(theirs)
            for _ in range(60):
                got = loss(ours)
                if (got - want).abs() > (2e-2 if enabled else 1e-3) * want.abs():
                    wrong.append((enabled, got.item(), want.item()))

    threads = [threading.Thread(target=work, args=(enabled,)) for enabled in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_review_a_thread_finds_the_whole_model(served):
    ours, _, _ = served
    missing, done = [], threading.Event()

    def look():
        while not done.is_set():
            if ours.pooler is None:
                missing.append(True)
            time.sleep(1e-4)  # or each step of a capture waits for this thread's turn to end

    thread = threading.Thread(target=look)
    thread.start()
    with torch.no_grad():
        for n in range(12, 36, 4):  # captures
            loss(ours, (n,) * 20)
    done.set()
    thread.join()
    assert not missing


def test_review_positions_beyond_the_bound_of_a_model():
    """Positions are given, so a sequence may be longer than the model has any."""
    ours, theirs = (x.to("cuda", torch.bfloat16).eval() for x in made("bert", max_position_embeddings=514))
    one = saccade.optimize(ours, fuse=False).served[0]
    ids, mask = (x.cuda() for x in padded((700, 3)))
    positions = (torch.arange(700, device="cuda") % 500)[None]
    with torch.no_grad():
        got, want = (m(ids, mask, position_ids=positions)[0][mask.bool()].float() for m in (ours, theirs))
    assert one.last.startswith("captured: ")
    assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_review_replicas_of_data_parallel():
    """Each runs its own parameters on its own GPU."""
    ours, theirs = (x.to("cuda:0", torch.float32).eval() for x in made("bert"))
    saccade.optimize(ours, fuse=False)
    ids, mask = (x.cuda() for x in padded((5, 9, 3, 30)))
    found = nn.DataParallel(ours, [0, 1])(input_ids=ids, attention_mask=mask)[0]
    wanted = theirs(input_ids=ids, attention_mask=mask)[0]
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    found[mask.bool()].square().sum().backward()
    wanted[mask.bool()].square().sum().backward()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
