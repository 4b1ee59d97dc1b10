"""`lengths`: checked once per tensor, and accepted however they were made."""

from __future__ import annotations

import gc

import pytest
import torch

import saccade
from saccade.engine import lengths as module
from saccade.engine.lengths import checked_lengths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def checks(monkeypatch):
    """The tensors whose values were read; the memory of checked lengths starts empty."""
    found = []
    check = module.check_length_values
    monkeypatch.setattr(module, "check_length_values", lambda *a: (found.append(a), check(*a)))
    monkeypatch.setattr(module, "_CHECKED", {})
    return found


def qkv():
    return [torch.randn(2, 2, 5, 16, device=DEVICE) for _ in range(3)]


def of(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, device=DEVICE, dtype=dtype)


def test_alternating_tensors_are_read_once_each_on_a_gpu(checks):
    q, k, v = qkv()
    several = [of(3, 5), of(1, 2), of(4, 4, dtype=torch.int32)]
    for _ in range(4):  # layers of a model
        for lengths in several:
            saccade.attention(q, k, v, lengths=lengths)
            saccade.dynamic_mask_attention(q, k, v, k[..., 0], keep=2, lengths=lengths)
    if str(DEVICE) == "cpu":  # where a look waits for nobody, and numpy may have changed the values
        assert {id(lengths) for lengths, _ in checks} == set(map(id, several))
        return
    assert len(checks) == 3
    saccade.attention(q, k, v, lengths=several[0].clone())
    assert len(checks) == 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_are_given_dense_int32(dtype):
    lengths = of(3, 9, 5, 9, dtype=dtype)[::2]
    found = checked_lengths(lengths, 5)
    assert (found.dtype, found.stride(), found.tolist()) == (torch.int32, (1,), [3, 5])
    assert checked_lengths(lengths, 5, any_width=True) is lengths
    assert checked_lengths(of(0, 5), 5).tolist() == [0, 5]


def test_another_device_than_the_cpu_is_asked_once_for_each_version_and_use(checks):
    """A look at a tensor of such a device would wait for it; one without numbers stands for it here."""
    tensor, other, asked = torch.empty(2, device="meta"), torch.empty(2, device="meta"), []

    def uses(*about):
        for x in about:
            module.check_once(tensor, x, lambda x=x: asked.append(x))

    uses("a", "a", "b", "b", "a")
    assert asked == ["a", "b", "a"]
    tensor.zero_()
    uses("a")
    module.check_once(other, "a", lambda: asked.append("other"))
    uses("a")
    assert asked == ["a", "b", "a", "a", "other"]


@pytest.mark.parametrize("backend", ["short", "ragged", "shared_bias"])
def test_values_that_nobody_could_read_are_clamped(backend, monkeypatch):
    """As those of a captured graph, which are written once it is replayed."""
    monkeypatch.setattr(module, "check_length_values", lambda *given: None)
    found = []
    for lengths in (of(9, -3), of(5, 0)):
        torch.manual_seed(0)
        memory = [torch.randn(2, 2, 12, 16, device=DEVICE) for _ in range(3)]
        given = [x[:, :, :5].requires_grad_() for x in memory]
        bias = torch.randn(2, 5, 5, device=DEVICE) if backend != "ragged" else None
        out = saccade.attention(*given, bias, lengths=lengths, backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_the_oldest_is_forgotten_first(checks):
    held, asked = [torch.empty(1, device="meta") for _ in range(module._MAX_TENSORS + 1)], []
    for x in [*held[:9], held[0], *held[9:]]:
        module.check_once(x, 0 if x is not held[0] else len(asked), lambda: asked.append(0))
    assert id(held[0]) in module._CHECKED
    assert id(held[1]) not in module._CHECKED


def test_a_change_is_noticed_among_others(checks):
    first, second = of(3, 5), of(1, 2)
    for _ in range(2):
        checked_lengths(first, 5)
        checked_lengths(second, 5)
    first[0] = 9
    checked_lengths(second, 5)
    with pytest.raises(saccade.InvalidArgument, match="range from 5 to 9"):
        checked_lengths(first, 5)
    with pytest.raises(saccade.InvalidArgument, match="range from 5 to 9"):  # an error is not remembered as checked
        checked_lengths(first, 5)
    with pytest.raises(saccade.InvalidArgument, match="Tk = 1"):
        checked_lengths(second, 1)


def test_the_memory_is_bounded_and_holds_no_tensor(checks):
    held = [of(1, 2) for _ in range(3 * module._MAX_TENSORS)]
    for lengths in held:
        checked_lengths(lengths, 5)
        assert len(module._CHECKED) <= module._MAX_TENSORS
    references = [seen[0] for seen in module._CHECKED.values()]
    del held, lengths
    checks.clear()
    gc.collect()
    assert not any(reference() is not None for reference in references)
    kept = of(1, 2)
    checked_lengths(kept, 5)
    assert len(module._CHECKED) == 1  # entries of dead tensors were removed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_made_in_inference_mode(dtype):
    q, k, v = qkv()
    with torch.inference_mode():
        inferred = of(3, 5, dtype=dtype)
    plain = of(3, 5, dtype=dtype)
    scores = torch.randn(2, 2, 5, device=DEVICE)
    calls = {
        "attention": lambda n: saccade.attention(q, k, v, lengths=n),
        "short": lambda n: saccade.attention(q, k, v, lengths=n, backend="short"),
        "packed": lambda n: saccade.attention_qkvpacked(torch.stack((q, k, v), 2).transpose(1, 3), lengths=n),
        "dynamic": lambda n: saccade.dynamic_mask_attention(q, k, v, scores, keep=2, lengths=n),
        "expiry": lambda n: saccade.expiry(scores, 2, lengths=n),
        "cache": lambda n: saccade.DynamicMaskCache(2).attend(q, k, v, scores, lengths=n),
        "decode": lambda n: saccade.DynamicMaskCache(2).attend(q, k, v, scores, lengths=n, backend="decode"),
    }
    for name, call in calls.items():
        expected = call(plain)
        for _ in range(2):
            assert torch.equal(call(inferred), expected), name
        with torch.inference_mode():
            assert torch.equal(call(inferred), expected), name
    leaf = q.clone().requires_grad_()
    for backend in ("short", "sdpa", "reference"):
        out = saccade.attention(leaf, k, v, lengths=inferred, backend=backend)
        assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()
    out = saccade.dynamic_mask_attention(leaf, k, v, scores, keep=2, lengths=inferred)
    assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()


def test_modules_in_inference_mode():
    encoder = saccade.nn.encoder.Encoder(saccade.nn.encoder.EncoderLayer(32, 2, 64, 0.0, device=DEVICE), 2)
    dynamic = saccade.nn.dynamic_mask.DynamicMaskAttention(32, 2, keep=3, device=DEVICE)
    landmarks = saccade.nn.NystromAttention(32, 2, landmarks=4, device=DEVICE)
    x = torch.randn(2, 5, 32, device=DEVICE)
    with torch.inference_mode():
        lengths = torch.ones(2, 5, device=DEVICE).sum(1).long()
        for layer in (encoder, landmarks):
            assert layer(x, lengths).shape == x.shape
        cache = saccade.DynamicMaskCache(3)
        assert dynamic(x, lengths=lengths).shape == x.shape
        assert dynamic(x, lengths=lengths, cache=cache).shape == x.shape


@pytest.mark.skipif(DEVICE == "cuda", reason="on a device a tensor of inference mode is read once, as a check waits for it")
def test_lengths_of_inference_mode_are_read_at_each_call():
    q, k, v = qkv()
    with torch.inference_mode():
        lengths = of(3, 5)
        saccade.attention(q, k, v, lengths=lengths)
        lengths[0] = 9
        with pytest.raises(saccade.InvalidArgument, match="range from 5 to 9"):
            saccade.attention(q, k, v, lengths=lengths)


def test_lengths_that_numpy_changed_are_looked_at_again():
    """numpy writes into the memory of a tensor on a CPU without a new version of it."""
    lengths = torch.tensor([8, 3])
    query = torch.randn(2, 2, 8, 16)
    saccade.attention(query, query, query, lengths=lengths, backend="reference")
    lengths.numpy()[1] = 10**6
    with pytest.raises(saccade.InvalidArgument, match="lengths range from 8 to 1000000; allowed is 0 to Tk = 8"):
        saccade.attention(query, query, query, lengths=lengths, backend="reference")
