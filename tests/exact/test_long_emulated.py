"""The sources of the kernels for sequences beyond 128 tokens on a CPU, against the reference: dense and packed, every head dim, ends of tiles."""

from __future__ import annotations

import functools

import emulator
import pytest
import torch
import torch.nn.functional as F

from saccade.engine.philox import dropout_keep
from saccade.engine.window import ends_of, in_window
from saccade.exact.args import AttentionArgs, repeated
from saccade.exact.long import bias_gradient, config, mask_bits, sm90
from saccade.exact.long import launchers as long
from saccade.exact.long.bias import readable
from saccade.exact.ragged import launchers as ragged
from saccade.exact.shared_bias import launchers as of_bias
from saccade.exact.testing.check import check_attention
from saccade.exact.varlen.args import ALIGNED_LAST, BOTTOM_RIGHT, FULL, FULL_BOTTOM_RIGHT, HIDE_LATER, UPPER_LEFT, VarlenArgs
from saccade.launch import delta
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import CudaLaunch
from saccade.testing.cases import Case
from saccade.testing.judge import report

SEED = 0x1234567_89ABCDEF


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaLaunch, "ready", emulator.ready)
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 2)  # blocks of backward, which walk over several heads each
    monkeypatch.setattr(delta, "delta_of", rows_of_out)
    monkeypatch.setattr(sm90, "_LAUNCHES", type(sm90._LAUNCHES)())
    monkeypatch.setattr(bias_gradient, "multiprocessors", lambda device: 5)  # parts of the rows
    monkeypatch.setattr(bias_gradient, "_LAUNCHES", type(sm90._LAUNCHES)())
    monkeypatch.setattr(of_bias, "rows_of", functools.partial(rows_of_bias, of_bias.rows_of))


def rows_of_bias(compute, args, dout, dlse, out, lse, **options):
    """Triton's interpreter multiplies no bfloat16."""
    if args.query.dtype == torch.bfloat16:
        wide = {name: getattr(args, name).float() for name in ("query", "key", "value", "bias")}
        args, dout, out = args._replace(**wide, launches=None), dout.float(), out.float()
    return compute(args, dout, dlse, out, lse, **options)


def rows_of_out(dout, out, dlse):
    rows = (dout.float() * out.float()).sum(-1)
    return rows if dlse is None else rows - dlse


def reference(query, key, value, dout, seen, dlse, kept=1.0, bias=None):
    """out, lse, dq, dk, dv in float64, and the gradient of a bias; seen `[..., Tq, Tk]`. kept: what dropout multiplies each weight with."""
    leaves = [x.double().requires_grad_() for x in (query, key, value, *([] if bias is None else [bias]))]
    by_head = [x.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for x in leaves[1:3]]
    scores = leaves[0] @ by_head[0].mT * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + repeated(leaves[3], len(query))
    scores = scores.masked_fill(~seen, -torch.inf)
    none = ~(scores.detach() > -torch.inf).any(-1)
    lse = torch.logsumexp(scores.masked_fill(none[..., None], 0.0), -1).masked_fill(none, 0.0)
    # not by lse, which far scores leave no room for the logarithm of a sum
    weights = torch.softmax(scores.masked_fill(none[..., None], 0.0), -1).masked_fill(none[..., None], 0.0)
    out = (weights * kept) @ by_head[1]
    total = (out * dout).sum() + (0.0 if dlse is None else (lse * dlse).sum())
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return out.detach(), lse.detach().masked_fill(none, -torch.inf), *grads


def compare(found, expected, tolerance=0.015):
    """Relative to the largest of each, for weights and their gradients are rounded to 16 bits."""
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), found, expected, strict=False):
        assert x.shape == y.shape
        bound = tolerance * max(1.0, y[y.isfinite()].abs().amax().item() if y.isfinite().any() else 0.0)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def kept_of(seed, dropout_p, *sizes):
    """The factors with which dropout multiplies the weights, float64 `[B, H, Tq, Tk]`."""
    return 1.0 if seed is None else dropout_keep(seed, dropout_p, *sizes).double() / (1.0 - dropout_p)


def dense(
    heads, q_len, kv_len, dim, dtype=torch.bfloat16, causal=False, lengths=None, dlse=False, kv_heads=None, mask=None, batch=1, dropout_p=0.0,
    window=None, bias=None, bias_grad=True,
):  # fmt: skip
    if lengths is not None:
        batch = len(lengths)
    elif mask is not None and mask.dim() == 4:
        batch = mask.shape[0]
    seed = torch.tensor([SEED]) if dropout_p else None
    sizes = [(q_len, heads), *[(kv_len, kv_heads or heads)] * 2, (q_len, heads)]
    made = [torch.randn(batch, t, h, dim).to(dtype).transpose(1, 2) for t, h in sizes]
    seen = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask
    if causal:
        seen = seen & torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    seen = seen & in_window(torch.arange(q_len)[:, None], torch.arange(kv_len), *ends_of(window))
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32)
        real = (torch.arange(kv_len) < lengths[:, None])[:, None]
        seen = seen & real[:, :, None]
    grad = torch.randn(batch, heads, q_len) if dlse else None
    kept = kept_of(seed, dropout_p, batch, heads, q_len, kv_len)
    if bias is not None:
        bias = bias.to(dtype)
    expected = reference(*made, seen, grad, kept, bias)
    query, key, value, dout = made
    if lengths is not None:  # what lies behind the last key is never read
        key, value = (x.masked_fill(~real[..., None], torch.nan) for x in (key, value))
    numbers, (left, right) = (dropout_p, causal, dim**-0.5), ends_of(window)
    args = AttentionArgs(
        query, key, value, mask, bias, lengths, seed, *numbers, window_left=left, window_right=right, launches=LaunchCache()
    )
    results = []
    for _ in range(2):  # the second call is known
        out, lse = long.forward(args)
        found = [out, lse]
        if bias is None or dim <= config.MAX_BIAS_HEAD_DIM:
            found += long.backward(args, dout, grad, out, lse, bias_grad=bias is not None and bias_grad, packed=None)
        results.append([x for x in found if x is not None])
        assert len(results[-1]) == (2 if len(found) == 2 else 6 if bias is not None and bias_grad else 5)
        compare(results[-1], expected)
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(*results, strict=True))


def test_what_is_known_is_asked_of_strides_and_addresses():
    """Gradients of the output in another memory order, tensors at odd addresses, and packed gradients, under one memory of launches."""
    query, key, value, dout = (torch.randn(1, 70, 2, 64).bfloat16().transpose(1, 2) for _ in range(4))
    launches, seen = LaunchCache(), torch.ones(70, 70, dtype=torch.bool)
    expected = reference(query, key, value, dout, seen.expand(1, 2, -1, -1), None)
    odd = torch.empty(query.numel() + 1, dtype=query.dtype)[1:].view(1, 70, 2, 64).transpose(1, 2).copy_(query)
    shared = torch.ones(1, 2, 1, 64).bfloat16().expand(-1, -1, 70, -1)
    packed = torch.full((1, 70, 3, 2, 64), torch.nan).bfloat16()
    for q, d, into in (
        (query, dout, None),
        (query, dout.contiguous(), None),
        (odd, dout, None),
        (query, dout, packed),
        (query, shared, None),
    ):
        args = AttentionArgs(q, key, value, None, None, None, None, 0.0, False, 0.125, launches=launches)
        wanted = reference(query, key, value, shared, seen.expand(1, 2, -1, -1), None) if d is shared else expected
        for _ in range(2):
            out, lse = long.forward(args)
            compare((out, lse, *long.backward(args, d, None, out, lse, bias_grad=False, packed=into)[:3]), wanted)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dense_rows(dim):
    dense(3, 197, 261, dim, dlse=True)


@pytest.mark.parametrize("tokens", [(1, 129), (130, 1), (80, 16), (16, 80), (33, 321)], ids=str)
def test_ends_of_tiles(tokens):
    dense(1, *tokens, 64)


@pytest.mark.parametrize(("dim", "dtype"), [(40, torch.float16), (8, torch.bfloat16)], ids=str)
def test_head_dims_between_tiles(dim, dtype):
    dense(2, 70, 140, dim, dtype)


@pytest.mark.parametrize("tokens", [(197, 197), (70, 300), (300, 70)], ids=str)
def test_causal(tokens):
    dense(1, *tokens, 64, causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(causal):
    dense(1, 70, 200, 64, causal=causal, lengths=[200, 0, 129, 65], dlse=True)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_maxima_that_rise_behind_the_first_chunk(dim):
    """By more than 2^8, for some rows of one warp alone, and once more in the last, narrow chunk: O is scaled then, and the sum of weights."""
    query, key, value, dout = (torch.randn(1, t, 2, dim).bfloat16().transpose(1, 2) for t in (140, 210, 210, 140))
    query[:, :, :, 0], key[:, :, :, 0] = 0.0, 0.0
    query[:, :, 5:90:17, 0] = dim**0.5
    key[:, :, 70:80, 0], key[:, :, 200:, 0] = 12.0, 24.0
    seen = torch.ones(1, 2, 140, 210, dtype=torch.bool)
    rises = (query.float() @ key.float().mT * dim**-0.5).unflatten(-1, (3, 70)).amax(-1).diff(dim=-1) > 6
    assert rises.any((0, 1)).tolist() == [[row in range(5, 90, 17)] * 2 for row in range(140)]
    args = AttentionArgs(query, key, value, None, None, None, None, 0.0, False, dim**-0.5, launches=LaunchCache())
    expected = reference(query, key, value, dout, seen, None)
    for x, y in zip(long.forward(args), expected, strict=False):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=0.015 * y.abs().amax().item())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT], ids=["full", "upper-left", "lower-right"])
@pytest.mark.parametrize("dim", [32, 64])
def test_packed_sequences(dim, causal):
    packed(dim, causal, [(5, 5), (70, 150), (9, 9), (150, 70), (0, 40), (130, 0), (64, 64)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("tokens", [(65, 129), (129, 65), (197, 257), (257, 197)], ids=str)
def test_grouped_heads(tokens, dim):
    dense(6, *tokens, dim, kv_heads=2, dlse=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2)], ids=["one-key-head", "two"])
def test_grouped_heads_with_lengths(heads, kv_heads, causal):
    dense(heads, 150, 200, 64, torch.float16, causal, lengths=[200, 0, 129, 65], dlse=True, kv_heads=kv_heads)


def random_mask(*shape, without=(0, 17)):
    """Half of the pairs, and rows that see nothing."""
    mask = torch.rand(*shape) < 0.5
    if shape[2] > 1:
        mask[:, :, [*without, shape[2] - 1]] = False
    return mask


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("tokens", [(65, 129), (129, 65), (197, 257), (257, 197), (40, 33)], ids=str)
def test_masks(tokens, dim):
    dense(2, *tokens, dim, dlse=True, mask=random_mask(1, 2, *tokens))


MASKS = {
    "each": lambda q, k: random_mask(3, 2, q, k),
    "batch": lambda q, k: random_mask(3, 1, q, k).expand(3, 2, q, k),
    "heads": lambda q, k: random_mask(1, 2, q, k).expand(3, 2, q, k),
    "shared": lambda q, k: random_mask(1, 1, q, k).expand(3, 1, q, k),
    "of-two-axes": lambda q, k: random_mask(1, 1, q, k)[0, 0],
    "keys": lambda q, k: random_mask(3, 1, 1, k),
    "expanded-keys": lambda q, k: random_mask(3, 1, 1, k).expand(3, 2, q, k),
    "queries": lambda q, k: random_mask(3, 2, q, 1),
    "expanded-queries": lambda q, k: random_mask(3, 2, q, 1).expand(3, 2, q, k),
    "by-key-in-memory": lambda q, k: random_mask(3, 1, q, k).mT.contiguous().mT,
    "at-odd-strides": lambda q, k: random_mask(3, 1, q, 2 * k + 1)[..., 1::2],
    "nothing": lambda q, k: torch.zeros(3, 1, q, k, dtype=torch.bool),
    "no-first-keys": lambda q, k: (torch.arange(k) >= 70).expand(3, 1, q, k),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_any_strides(kind):
    dense(2, 70, 133, 64, mask=MASKS[kind](70, 133))


@pytest.mark.parametrize("kind", ["batch", "keys"])
def test_masks_beside_lengths_and_grouped_heads(kind):
    dense(2, 70, 133, 64, torch.float16, lengths=[133, 0, 67], dlse=True, kv_heads=1, mask=MASKS[kind](70, 133))


@pytest.mark.parametrize("by_key", [False, True], ids=["by-query", "by-key"])
def test_bits_behind_the_last_column_of_a_mask_are_0(by_key):
    words = mask_bits.pack(torch.ones(1, 2, 40, 70, dtype=torch.bool), by_key)
    columns = 40 if by_key else 70
    assert words.shape == (1, 2, 110 - columns, -(-columns // 64))
    assert {sum(int(x) % 2**64 << 64 * i for i, x in enumerate(row)) for row in words.flatten(0, 2)} == {2**columns - 1}


@pytest.mark.parametrize(
    ("bias", "copied"),
    [
        (torch.zeros(1, 2, 9, 16).half(), False),
        (torch.zeros(1, 2, 9, 20).half()[..., :16], True),
        (torch.zeros(1, 2, 9, 24).half()[..., :17], False),
        (torch.zeros(2, 9, 16).half().expand(5, -1, -1, -1), False),
        (torch.zeros(1, 2, 1, 16).half().expand(-1, -1, 9, -1), True),
        (torch.zeros(1, 9, 16, 2).half().permute(0, 3, 1, 2), True),
        (torch.zeros(1, 2, 9, 17).half(), True),
        (torch.zeros(289).half()[1:].view(1, 2, 9, 16), True),
    ],
    ids=lambda x: "x".join(map(str, x.stride())) if isinstance(x, torch.Tensor) else str(x),
)
def test_biases_that_the_copy_engine_cannot_read_are_copied(bias, copied):
    bias = bias.copy_(torch.randn(bias.shape)) if 0 not in bias.stride() else bias
    found = readable(bias)
    assert torch.equal(found, bias[:1])
    assert found.shape == (1, *bias.shape[1:])
    assert (found.data_ptr() != bias.data_ptr()) == copied
    assert found.data_ptr() % 16 == 0
    assert all(s % 8 == 0 for s in found.stride()[:3])


def test_masks_beside_causal_rows():
    dense(1, 150, 133, 64, causal=True, mask=random_mask(1, 1, 150, 133))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT], ids=["full", "upper-left", "lower-right"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_packed_grouped_heads(dim, causal):
    packed(dim, causal, [(5, 5), (70, 150), (9, 9), (150, 70), (0, 40), (130, 0), (64, 64)], heads=6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dropout_of_dense_rows(dim):
    dense(2, 133, 197, dim, dlse=True, batch=2, dropout_p=0.3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [(65, 129), (1, 66), (130, 2), (16, 83), (257, 65)], ids=str)
def test_dropout_at_ends_of_tiles(tokens):
    dense(2, *tokens, 64, dropout_p=0.4)


@pytest.mark.parametrize(("dim", "dtype"), [(40, torch.float16), (128, torch.float16)], ids=str)
def test_dropout_of_causal_rows_and_lengths(dim, dtype):
    dense(2, 70, 198, dim, dtype, causal=True, lengths=[198, 0, 129], dlse=True, dropout_p=0.1)


@pytest.mark.parametrize("dropout_p", [1e-9, 0.999, 1.0 - 2.0**-40], ids=str)
def test_dropout_of_nearly_none_and_nearly_all(dropout_p):
    """In float32 the last is 1, and all weights go."""
    dense(1, 70, 70, 32, dropout_p=dropout_p)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT], ids=["full", "upper-left", "lower-right"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dropout_of_packed_sequences(dim, causal):
    packed(dim, causal, [(5, 5), (70, 150), (9, 9), (150, 70), (0, 40), (130, 0), (64, 64)], dropout_p=0.25, longer=59)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2)], ids=["one-key-head", "two"])
def test_dropout_of_grouped_heads(heads, kv_heads, dim):
    """Draws count query heads, of which a block of backward has many."""
    dense(heads, 133, 197, dim, dlse=True, kv_heads=kv_heads, batch=2, dropout_p=0.3)


def test_dropout_of_grouped_heads_with_lengths():
    dense(4, 150, 200, 64, torch.float16, causal=True, lengths=[200, 0, 129], dlse=True, kv_heads=2, dropout_p=0.2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [FULL, BOTTOM_RIGHT], ids=["full", "lower-right"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dropout_of_packed_grouped_heads(dim, causal):
    lengths = [(5, 5), (70, 150), (9, 9), (150, 70), (0, 40), (130, 0), (64, 64)]
    packed(dim, causal, lengths, heads=6, dropout_p=0.25, longer=59)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dropout_under_a_mask(dim):
    dense(2, 133, 197, dim, dlse=True, mask=random_mask(2, 1, 133, 197), dropout_p=0.3)


@pytest.mark.parametrize("kind", ["each", "keys"])
def test_dropout_under_a_mask_beside_lengths_and_grouped_heads(kind):
    mask = MASKS[kind](70, 133)
    mask = mask.expand(3, 4, -1, -1) if mask.shape[1] == 1 else mask.repeat_interleave(2, 1)
    dense(4, 70, 133, 64, torch.float16, lengths=[133, 0, 67], dlse=True, kv_heads=2, mask=mask, dropout_p=0.2)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_packed_sequences_of_one_warpgroup(dim):
    """Up to 64 queries a team of forward is one warpgroup."""
    packed(dim, BOTTOM_RIGHT, [(5, 5), (33, 64), (9, 9), (64, 48), (0, 40), (17, 0), (64, 64)])


WINDOWS = [(64, 64), (0, 0), (3, 200), (None, 5), (129, None), (1000, 0), (17, 40)]
# of a round of 128 keys a warpgroup passes the first chunk, the last one, both, or several; wide ones have chunks without a mask between
PASSED = [(0, 0), (256, 256), (0, 300), (300, 0), (63, 1), (20, 128)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window, causal, dim):
    """700 keys are two segments of backward, of which the first goes on into the second."""
    dense(1, 700, 700, dim, dlse=True, window=window, causal=causal)


def test_the_first_keys_outside_of_a_window_at_the_corners_of_tiles():
    """One pair of 64 queries and 64 keys is outside on either side, and would have nearly all the weight of its query."""
    left, right = 126, 62
    query, key, value, dout = (torch.randn(1, 1, 320, 64).half() for _ in range(4))
    key[:, :, 0:256:64] = 4 * query[:, :, left + 1 : 320 : 64]
    key[:, :, right + 1 :: 64] = 4 * query[:, :, 0:320:64]
    rows = torch.arange(320)
    seen = in_window(rows[:, None], rows, *ends_of((left, right))).expand(1, 1, -1, -1)
    args = AttentionArgs(
        query, key, value, None, None, None, None, 0.0, False, 0.125, window_left=left, window_right=right, launches=LaunchCache()
    )
    out, lse = long.forward(args)
    found = (out, lse, *long.backward(args, dout, None, out, lse, bias_grad=False, packed=None)[:3])
    compare(found, reference(query, key, value, dout, seen, None))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tokens", [(1, 600), (600, 1), (130, 530), (530, 130), (33, 64), (1100, 1100)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_at_ends_of_tiles(window, tokens):
    dense(1, *tokens, 32, window=window)


def test_windows_beside_lengths_and_grouped_heads():
    dense(4, 300, 640, 64, torch.float16, lengths=[640, 0, 129, 65], dlse=True, kv_heads=2, window=(40, 70))


def test_windows_that_reach_over_a_segment():
    """The window of a chunk of queries begins in one segment and ends in the next but one; then the shares of two blocks of 18 rounds."""
    assert config.SEGMENTS[-1] == 4
    dense(1, 1500, 1500, 32, window=(100, 700), kv_heads=1)
    assert config.SEGMENTS[0] == 16
    dense(1, 2200, 2200, 32, window=(300, 90), kv_heads=1)


@pytest.fixture
def shares(monkeypatch):
    """Sets how many blocks have equal shares of all rounds."""
    monkeypatch.setattr(config, "SEGMENTS", (0,))  # all sequences are longer
    return lambda blocks: monkeypatch.setattr(sm90, "multiprocessors", lambda device: blocks)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("blocks", [1, 3, 7, 100])
@pytest.mark.parametrize("window", PASSED, ids=str)
def test_equal_shares_of_rounds(window, blocks, shares):
    """A share begins and ends within sequences, has several heads or one round, or less if there are more blocks."""
    shares(blocks)
    dense(2, 500, 720, 64, lengths=[720, 0, 129, 65, 577], dlse=True, kv_heads=1, window=window)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("blocks", [1, 3, 7, 100])
@pytest.mark.parametrize("causal", [UPPER_LEFT, FULL_BOTTOM_RIGHT], ids=["upper-left", "full-lower-right"])
@pytest.mark.parametrize("window", PASSED, ids=str)
def test_equal_shares_of_rounds_of_packed_sequences(window, causal, blocks, shares):
    shares(blocks)
    lengths = [(5, 5), (640, 130), (9, 9), (150, 700), (0, 40), (1, 321), (600, 590)]
    packed(64, causal, lengths, heads=4, window=window, longer=59)


@pytest.mark.parametrize(
    ("rounds", "longest", "wanted"), [(2112, 16, 16), (2111, 16, 8), (1, 16, 4), (2112, 17, 1), (1, 17, 1)], ids=str
)
def test_blocks_have_shares_of_sequences_that_are_longer_than_a_segment(rounds, longest, wanted):
    assert config.segment_rounds(rounds, longest, 132) == wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [32, 64])
def test_dropout_in_windows(dim):
    dense(2, 533, 597, dim, dlse=True, batch=2, dropout_p=0.3, window=(70, 33))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT, FULL_BOTTOM_RIGHT], ids=["full", "upper-left", "lower-right", "full-lower-right"]
)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_packed_windows(window, causal):
    packed(64, causal, [(5, 5), (70, 150), (9, 9), (150, 70), (0, 40), (130, 0), (600, 590)], heads=4, window=window, longer=59)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("window", PASSED, ids=str)
def test_chunks_that_a_warpgroup_passes(window, dim):
    """Beside all that dense rows take: keys that end in either warpgroup's half of a round, dropout, grouped heads."""
    lengths = [720, 0, 129, 65, 577]
    dense(2, 500, 720, dim, torch.float16, lengths=lengths, dlse=True, kv_heads=1, dropout_p=0.2, window=window)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [UPPER_LEFT, FULL_BOTTOM_RIGHT], ids=["upper-left", "full-lower-right"])
@pytest.mark.parametrize("window", PASSED, ids=str)
def test_chunks_that_a_warpgroup_passes_in_packed_sequences(window, causal):
    lengths = [(5, 5), (640, 130), (9, 9), (150, 700), (0, 40), (1, 321), (600, 590)]
    # under dropout delta of a query with one key is the rounding error of `out`, 0.02
    packed(64, causal, lengths, heads=4, dropout_p=0.2 if window == (20, 128) else 0.0, window=window, longer=59)


@pytest.mark.parametrize("segments", [config.SEGMENTS, (4,)], ids=["segments", "shares"])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_windows_by_the_ragged_family(dim, segments, monkeypatch):
    """Every sequence in one launch, and zeros behind the last one; token tiles where windows of such a head dim are not timed."""
    taken = []
    monkeypatch.setattr(config, "SEGMENTS", segments)
    monkeypatch.setattr(config, "TIMED_WINDOWS", 128)
    monkeypatch.setattr(sm90, "takes", lambda args, *others: taken.append(len(others)) is None)
    lengths = [70, 0, 530, 3]
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    query, key, value, dout = (torch.randn(int(ends[-1]) + 2, h, dim).half() for h in (4, 2, 2, 4))
    args = VarlenArgs(query, key, value, ends, ends, None, None, 530, 530, 0.0, FULL, dim**-0.5, 60, 40)
    out, lse = ragged.forward(args)
    gradients = ragged.backward(args, dout, None, out, lse, bias_grad=False)[:3]
    assert taken == [1, 5]
    for s, tokens in enumerate(lengths):
        rows = slice(int(ends[s]), int(ends[s + 1]))
        seen = in_window(torch.arange(tokens)[:, None], torch.arange(tokens), 60, 40)
        found = (out[rows].transpose(0, 1), lse[:, rows], *(x[rows].transpose(0, 1) for x in gradients))
        if tokens:
            compare(found, reference(*(x[rows].transpose(0, 1) for x in (query, key, value, dout)), seen.expand(4, -1, -1), None))
    assert not any(x[-2:].any() for x in (out, *gradients))
    monkeypatch.setattr(config, "TIMED_WINDOWS", dim - 1)
    ragged.forward(args)
    assert taken == [1, 5]


# --- a bias


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("tokens", [(70, 70), (129, 197), (257, 130), (40, 33), (128, 448)], ids=str)
def test_biases(tokens, dim, dtype):
    """Three rows are two turns of two teams, of which one idles in the second; 448 keys are more chunks than there are tiles of the bias."""
    dense(2, *tokens, dim, dtype, dlse=True, batch=3, bias=torch.randn(1, 2, *tokens))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("late", [(32,), ()], ids=["late", "early"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rise", [3.0, 7.0, 9.0, 40.0, 200.0, 30000.0])
def test_biases_that_rise_behind_the_first_chunk(rise, dtype, late, monkeypatch):
    """By less and by more than what weights may grow before the maxima are looked for, and beyond what an exponential holds, under a mask too."""
    monkeypatch.setattr(config, "LATE_MAXIMA", late)
    bias = torch.randn(1, 2, 140, 210)
    bias[:, :, 5:90:17, 70:80] += rise
    bias[:, :, 100, 200:] += rise
    bias[:, :, 3, :64] -= rise
    bias[:, :, 120:, 64:] += rise
    mask = torch.ones(3, 1, 1, 210, dtype=torch.bool)
    mask[1, ..., 72:200:3], mask[2, ..., :130] = False, False
    dense(2, 140, 210, 32, dtype, mask=mask, bias=bias)
    dense(2, 140, 210, 32, dtype, batch=2, bias=bias, dropout_p=0.2)


@pytest.mark.parametrize("late", [(32,), ()], ids=["late", "early"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_biases_keep_the_budget(dtype, late, monkeypatch):
    monkeypatch.setattr(config, "LATE_MAXIMA", late)
    case = Case("bias", 4, 2, 2, 133, 197, 32, bias=(1, 2, 133, 197), lse_grad=True)
    results = check_attention(case, dtype, "cpu", "long", run=lambda x: Emulated.apply(x.query, x.key, x.value, x.bias))
    assert all(r.ok for r in results), report(case, results)


class Emulated(torch.autograd.Function):
    """`(out, lse)` of a call with a bias."""

    @staticmethod
    def forward(ctx, *given):
        out, lse = long.forward(Emulated.args(given))
        ctx.save_for_backward(*given, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *given, out, lse = ctx.saved_tensors
        return long.backward(Emulated.args(given), dout, dlse, out, lse, bias_grad=True, packed=None)

    @staticmethod
    def args(given):
        query, key, value, bias = given
        return AttentionArgs(query, key, value, None, bias, None, None, 0.0, False, query.shape[-1] ** -0.5)


BIASES = {
    "rows": lambda q, k: torch.randn(1, 2, q, k),
    "rows-and-heads": lambda q, k: torch.randn(1, 1, q, k),
    "rank-2": lambda q, k: torch.randn(q, k),
    "heads": lambda q, k: torch.randn(6, 1, q, k),
    "none": lambda q, k: torch.randn(6, 2, q, k),
    "windows": lambda q, k: torch.randn(3, 2, q, k),
    "windows-and-heads": lambda q, k: torch.randn(2, 1, q, k),
    "heads-inside": lambda q, k: torch.randn(1, q, k, 2).permute(0, 3, 1, 2),
    "by-key-in-memory": lambda q, k: torch.randn(1, 2, k, q).mT,
    "at-odd-strides": lambda q, k: torch.randn(1, 2, q, 2 * k + 1)[..., 1::2],
    "at-an-odd-address": lambda q, k: torch.randn(2 * q * 136 + 1)[1:].view(1, 2, q, 136)[..., :k],
    "part-of-wider-rows": lambda q, k: torch.randn(1, 2, q, 136)[..., :k],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", BIASES)
def test_biases_of_any_shape(kind):
    dense(2, 70, 133, 32, batch=6, bias=BIASES[kind](70, 133))


def test_a_bias_that_was_expanded():
    """Along rows its gradient is that of each; along queries it is copied."""
    dense(2, 70, 133, 32, batch=4, bias=torch.randn(1, 2, 70, 133).expand(4, -1, -1, -1))
    dense(2, 70, 133, 32, batch=4, bias=torch.randn(1, 2, 1, 133).expand(-1, -1, 70, -1))


@pytest.mark.parametrize("dim", [32, 64])
def test_biases_beside_lengths(dim):
    """The teams of a block have other numbers of chunks, and one has none."""
    lengths = [300, 0, 129, 65, 1, 300, 64]
    dense(2, 70, 300, dim, torch.float16, lengths=lengths, dlse=True, bias=torch.randn(1, 2, 70, 300))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("tokens", [(133, 197), (70, 448), (129, 33), (16, 130)], ids=str)
def test_biases_beside_masks_of_keys(tokens, dim, dtype):
    """448 keys are more chunks than there are places for their selectors. A row that sees no key is between two that do."""
    mask = torch.rand(3, 1, 1, tokens[1]) < 0.7
    mask[1] = False
    dense(2, *tokens, dim, dtype, dlse=True, mask=mask, bias=torch.randn(1, 2, *tokens))


KEY_MASKS = {
    "all": lambda k: torch.ones(3, 1, 1, k, dtype=torch.bool),
    "nothing": lambda k: torch.zeros(3, 1, 1, k, dtype=torch.bool),
    "one-key": lambda k: (torch.arange(k) == torch.tensor([0, k // 2, k - 1])[:, None])[:, None, None],
    "even-keys": lambda k: (torch.arange(k) % 2 == 0).expand(3, 1, 1, k),
    "odd-keys": lambda k: (torch.arange(k) % 2 == 1).expand(3, 1, 1, k),
    "no-first-chunk": lambda k: (torch.arange(k) >= torch.tensor([64, 70, 128])[:, None])[:, None, None],
    "no-chunk-between": lambda k: ((torch.arange(k) < 60) | (torch.arange(k) >= 135)).expand(3, 1, 1, k),
    "by-row-in-memory": lambda k: (torch.rand(k, 3) < 0.5).mT[:, None, None],
    "at-odd-strides": lambda k: (torch.rand(3, 1, 1, 2 * k + 1) < 0.5)[..., 1::2],
    "one-for-all-rows": lambda k: torch.rand(k) < 0.5,
    "one-for-all-keys": lambda k: torch.tensor([True, False, True])[:, None, None, None],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("kind", KEY_MASKS)
def test_masks_of_keys_of_any_strides(kind, dim, dtype):
    dense(2, 70, 197, dim, dtype, batch=3, mask=KEY_MASKS[kind](197), bias=torch.randn(1, 2, 70, 197))


def test_a_mask_of_keys_is_read_beside_a_bias_and_packed_without_one(monkeypatch):
    packed_masks, mask = [], torch.rand(3, 1, 1, 133) < 0.5
    pack = sm90.pack
    monkeypatch.setattr(sm90, "pack", lambda *given: packed_masks.append(given) or pack(*given))
    dense(2, 70, 133, 32, mask=mask, bias=torch.randn(1, 2, 70, 133))
    assert not packed_masks
    dense(2, 70, 133, 32, mask=mask)
    assert len(packed_masks) == 4  # forward and backward, twice


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_biases_beside_grouped_heads_dropout_lengths_and_masks(dim):
    mask = torch.rand(4, 1, 1, 200) < 0.7
    given = {"kv_heads": 2, "dropout_p": 0.3, "lengths": [200, 0, 129, 65], "mask": mask}
    dense(4, 150, 200, dim, dlse=True, bias=torch.randn(1, 4, 150, 200), **given)


def test_a_bias_without_gradient():
    dense(2, 70, 133, 64, batch=3, bias=torch.randn(1, 2, 70, 133), bias_grad=False)


FAR = {
    "hidden": lambda of: -torch.inf, "finfo-min": lambda of: of.min, "far": lambda of: -3000.0, "farther": lambda of: -20000.0,
    "finfo-max": lambda of: of.max / 2,
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("kind", FAR)
def test_far_biases(kind, dim, dtype):
    """A row of finfo.min is uniform, and one of -inf sees nothing."""
    value, bias = FAR[kind](torch.finfo(dtype)), torch.randn(1, 2, 133, 197)
    bias[:, :, 2], bias[:, :, 100] = value, value  # all of a row
    bias[:, :, 4, 1:] = value  # all but one key
    bias[:, :, 6] = -torch.inf
    bias[:, :, 6, 64:69] = value
    bias[:, :, 8, ::3] = value
    bias[:, :, 10, :128] = value  # whole chunks, the first ones
    bias[:, :, 12] = -torch.inf
    bias[:, :, 130:, 190:] = value
    mask = torch.ones(3, 1, 1, 197, dtype=torch.bool)
    mask[1, ..., 50:] = False
    dense(2, 133, 197, dim, dtype, mask=mask, bias=bias)


def test_two_biases_in_a_row():
    """Under one memory of launches: nothing of the first is left."""
    query, key, value, dout = (torch.randn(3, 70, 2, 32).bfloat16().transpose(1, 2) for _ in range(4))
    launches, seen = LaunchCache(), torch.ones(3, 2, 70, 70, dtype=torch.bool)
    for bias in torch.randn(2, 1, 2, 70, 72).bfloat16()[..., :70]:
        args = AttentionArgs(query, key, value, None, bias, None, None, 0.0, False, 32**-0.5, launches=launches)
        out, lse = long.forward(args)
        found = out, lse, *long.backward(args, dout, None, out, lse, bias_grad=True, packed=None)
        compare(found, reference(query, key, value, dout, seen, None, 1.0, bias))


def packed(dim, causal, lengths, heads=2, dropout_p=0.0, longer=0, window=None):
    """Some of the sequences of a batch, in another order; those between them hold NaN. longer: keys of a sequence of another launch, beyond theirs."""
    lengths = torch.tensor(lengths)
    members = torch.tensor([6, 1, 3, 4, 5, 0], dtype=torch.int32)  # the last is beyond the count
    taken, kv_heads = [6, 1, 3, 4, 5], 2
    ends = [F.pad(x.cumsum(0), (1, 0)).int() for x in lengths.T]
    sizes = [(ends[0], heads), *[(ends[1], kv_heads)] * 2, (ends[0], heads)]
    query, key, value, dout = (torch.full((int(e[-1]) + 2, h, dim), torch.nan).bfloat16() for e, h in sizes)
    rows = [tuple(slice(int(e[s]), int(e[s + 1])) for e in ends) for s in range(len(lengths))]
    for s in taken:
        for x, of in ((query, 0), (dout, 0), (key, 1), (value, 1)):
            x[rows[s][of]] = torch.randn_like(x[rows[s][of]])
    longest, seed = int(lengths.max()), torch.tensor([SEED]) if dropout_p else None
    kept_weights = kept_of(seed, dropout_p, len(lengths), heads, longest, longest + longer)
    args = VarlenArgs(
        query, key, value, *ends, None, seed, longest, longest + longer, dropout_p, causal, dim**-0.5, *ends_of(window)
    )
    count = torch.tensor([5], dtype=torch.int32)
    out, lse = torch.full_like(query, torch.nan), torch.full((heads, query.shape[0]), torch.nan)

    def parts(tensor, unit, fewest):
        """With a window the parts of the sequences, in an order that is no batch's. Rounds of a sequence are side by side, for blocks share them."""
        if window is None:
            return members, count
        listed = [(s, p) for s in taken for p in range(max(fewest, -(-int(tensor[s]) // unit)))]
        numbers = [s | p << 22 for s, p in (listed if unit == sm90.ROUND_ROWS else reversed(listed))]
        return torch.tensor([*numbers, 0], dtype=torch.int32), torch.tensor([len(numbers)], dtype=torch.int32)

    sm90.forward(args, *parts(lengths[:, 0], 128, 0), out, lse)
    gradients = tuple(torch.full_like(x, torch.nan) for x in (query, key, value))
    delta = torch.empty_like(lse) if sm90.owns_delta(dim) else rows_of_out(dout, out, None).T.contiguous()
    sm90.backward(args, *parts(lengths[:, 1], sm90.segment_rows(args), 1), dout, None, out, lse, delta, gradients)
    for s in taken:
        q, k = rows[s]
        tq, tk = (int(x) for x in lengths[s])
        seen = torch.ones(tq, tk, dtype=torch.bool)
        shift = tk - tq if causal in ALIGNED_LAST else 0
        if causal in HIDE_LATER:
            seen = seen.tril(shift)
        seen = seen & in_window(torch.arange(tq)[:, None] + shift, torch.arange(tk), *ends_of(window))
        one = [x.transpose(0, 1) for x in (query[q], key[k], value[k], dout[q])]
        found = (out[q].transpose(0, 1), lse[:, q], *(x[r].transpose(0, 1) for x, r in zip(gradients, (q, k, k), strict=True)))
        if tq and tk:
            weights = kept_weights if seed is None else kept_weights[s, :, :tq, :tk]
            compare(found, reference(*one, seen.expand(heads, -1, -1), None, weights))
        else:
            assert all(not x.any() for i, x in enumerate(found) if i != 1)
            assert (found[1] == -torch.inf).all()
    kept = torch.ones(query.shape[0], dtype=torch.bool)
    for s in taken:
        kept[rows[s][0]] = False
    assert out[kept].isnan().all()
    assert gradients[0][kept].isnan().all()
