"""The arguments that the functions named after flash-attn refuse; their results are tested with `attention_varlen`."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import saccade.flash_attn_interface as flash_attn
from saccade import InvalidArgument, UnsupportedProblem, attention

ENDS = torch.tensor([0, 4, 10], dtype=torch.int32)


def of_func(tensor):
    good = torch.randn(2, 10, 4, 8)
    return flash_attn.flash_attn_func(tensor, good, good)


def of_packed(tensor):
    return flash_attn.flash_attn_qkvpacked_func(tensor)


def of_varlen_packed(tensor):
    return flash_attn.flash_attn_varlen_qkvpacked_func(tensor, ENDS, 6)


REFUSED = [
    (of_func, (10, 4, 8), r"q has shape \[10, 4, 8\]; it must be \[B, S, H, D\]"),
    (of_packed, (2, 10, 2, 4, 8), r"qkv has shape \[2, 10, 2, 4, 8\]; it must be \[B, S, 3, H, D\]"),
    (of_packed, (2, 10, 3, 8), r"qkv has shape \[2, 10, 3, 8\]; it must be \[B, S, 3, H, D\]"),
    (of_varlen_packed, (10, 2, 4, 8), r"qkv has shape \[10, 2, 4, 8\]; it must be \[T, 3, H, D\]"),
]


@pytest.mark.parametrize(("call", "shape", "sentence"), REFUSED)
def test_another_shape_is_refused_with_the_one_that_is_allowed(call, shape, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        call(torch.randn(shape))


@pytest.mark.parametrize("call", [of_func, of_packed, of_varlen_packed])
def test_what_is_no_tensor_is_refused(call):
    with pytest.raises(InvalidArgument, match=r"is a ndarray; it must be a torch\.Tensor"):
        call(torch.randn(2, 10, 4, 8).numpy())


def test_the_shapes_that_are_named_are_taken():
    assert of_func(torch.randn(2, 10, 4, 8)).shape == (2, 10, 4, 8)
    assert of_packed(torch.randn(2, 10, 3, 4, 8)).shape == (2, 10, 4, 8)
    assert of_varlen_packed(torch.randn(10, 3, 4, 8)).shape == (10, 4, 8)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"causal": "no"}, "causal is 'no'; it must be True or False"),
        ({"causal": torch.ones(2)}, r"causal is a torch\.Tensor of shape \[2\]; it must be True or False"),
        ({"window_size": 128}, r"window_size is 128; it must be \(left, right\), .* or -1 for no limit"),
        ({"window_size": None}, r"window_size is None; it must be \(left, right\)"),
        ({"softcap": torch.ones(2)}, r"softcap is a torch.Tensor of shape \[2\]; .* allowed is 0\.0"),
    ],
    ids=str,
)
def test_options_that_are_none_are_refused(option, sentence):
    x, qkv = torch.randn(10, 4, 8), torch.randn(10, 3, 4, 8)
    calls = (
        lambda: flash_attn.flash_attn_func(x[None], x[None], x[None], **option),
        lambda: flash_attn.flash_attn_qkvpacked_func(qkv[None], **option),
        lambda: flash_attn.flash_attn_varlen_func(x, x, x, ENDS, ENDS, 6, 6, **option),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ENDS, 6, **option),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match=sentence):
            call()


def all_functions():
    """The four functions, each with tensors it takes."""
    x, qkv = torch.randn(10, 4, 8), torch.randn(10, 3, 4, 8)
    return [
        (flash_attn.flash_attn_func, (x[None], x[None], x[None])),
        (flash_attn.flash_attn_qkvpacked_func, (qkv[None],)),
        (flash_attn.flash_attn_varlen_func, (x, x, x, ENDS, ENDS, 6, 6)),
        (flash_attn.flash_attn_varlen_qkvpacked_func, (qkv, ENDS, 6)),
    ]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("window_size", (4, -2)), ("softcap", 3.0), ("alibi_slopes", torch.ones(4)), ("block_table", torch.ones(1)),
        ("s_aux", torch.ones(4)),
    ],
    ids=["window_size", "softcap", "alibi_slopes", "block_table", "s_aux"],
)  # fmt: skip
def test_every_function_that_names_an_option_refuses_it(name, given):
    named = [pair for pair in all_functions() if name in inspect.signature(pair[0]).parameters]
    assert named
    for function, tensors in named:
        with pytest.raises(InvalidArgument, match=f"{name} is"):
            function(*tensors, **{name: given})


def test_a_limit_may_be_an_integer_of_numpy():
    q, k, v = torch.randn(3, 2, 10, 4, 8)
    found = flash_attn.flash_attn_func(q, k, v, window_size=(np.int64(-1), np.int64(2)))
    assert torch.equal(found, flash_attn.flash_attn_func(q, k, v, window_size=(-1, 2)))


@pytest.mark.parametrize("window", [(0, 0), (2, 3), (-1, 1), (4, -1), (50, 50)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [10, 14, 7])
def test_windows_are_aligned_with_the_last_key(keys, causal, window):
    q, k, v = (torch.randn(2, n, 4, 8, requires_grad=True) for n in (10, keys, keys))
    rows, columns = torch.arange(10)[:, None] + keys - 10, torch.arange(keys)
    left, right = window
    seen = (columns >= rows - (99 if left < 0 else left)) & (columns <= rows + (99 if right < 0 else right))
    seen = seen & (columns <= rows) if causal else seen
    expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), seen, backend="reference").transpose(1, 2)
    ends_q, ends_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (10, keys))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    outs = [
        flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window),
        flash_attn.flash_attn_varlen_func(*packed, ends_q, ends_k, 10, keys, causal=causal, window_size=window).view_as(q),
    ]
    if keys == 10:
        qkv = torch.stack((q, k, v), 2)
        outs.append(flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal, window_size=window))
        of_tokens = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends_q, 10, causal=causal, window_size=window)
        outs.append(of_tokens.view_as(q))
    gradient = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for out in outs:
        torch.testing.assert_close(out, expected)
        for got, want in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradient, strict=True):
            torch.testing.assert_close(got, want)


def test_autocast_reaches_every_function():
    for function, tensors in all_functions():
        with torch.autocast("cpu", torch.bfloat16):
            assert function(*tensors).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_gradients_are_the_same_bits_each_time(head_dim, causal, packed):
    """799 keys: from there on torch's kernels add dq in another order from run to run."""
    shape = (2 * 799, 6, head_dim) if packed else (2, 799, 6, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 799, 2 * 799], device="cuda", dtype=torch.int32)
    dout, found = torch.randn(shape, device="cuda", dtype=torch.bfloat16), []
    for _ in range(6):
        if packed:
            out = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 799, 799, causal=causal, deterministic=True)
        else:
            out = flash_attn.flash_attn_func(q, k, v, causal=causal, deterministic=True)
        found.append(torch.autograd.grad(out, (q, k, v), dout))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_torchs_switch_holds_for_every_call(packed):
    shape = (2 * 1024, 6, 128) if packed else (2, 1024, 6, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 1024, 2048], device="cuda", dtype=torch.int32)
    dout, found = torch.randn_like(q), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(6):
            beside = (ends, ends, 1024, 1024) if packed else ()
            out = (flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func)(q, k, v, *beside)
            found.append(torch.autograd.grad(out, (q, k, v), dout))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.gpu
def test_what_no_kernel_of_ours_takes_is_refused_if_it_has_to_be_deterministic():
    q = torch.randn(1, 20, 2, 320, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedProblem, match="320"):
        flash_attn.flash_attn_func(q, q, q, deterministic=True)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_deterministic_is_a_flag(name):
    q = torch.randn(1, 10, 2, 8) if name == "flash_attn_func" else torch.randn(10, 2, 8)
    beside = () if name == "flash_attn_func" else (ENDS, ENDS, 6, 6)
    with pytest.raises(InvalidArgument, match="deterministic is 'no'; it must be True or False"):
        getattr(flash_attn, name)(q, q, q, *beside, deterministic="no")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_longest_sequence_may_be_a_tensor_as_in_flash_attn(dtype):
    qkv, ends = torch.randn(9, 3, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    longest = ends.diff().max().to(dtype)
    expected = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, longest, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_varlen_func(*qkv.unbind(1), ends, ends, longest, longest, causal=True), expected)


@pytest.mark.parametrize("longest", [torch.tensor([5, 5]), torch.tensor(5.0), torch.tensor(True)], ids=["two", "float", "bool"])
def test_another_tensor_is_no_longest_sequence(longest):
    q, ends = torch.randn(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"max_seqlen_k is a torch\.Tensor"):
        flash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 5, longest)
