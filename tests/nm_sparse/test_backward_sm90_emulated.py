"""The two kernels of the backward for sm_90a, run on a CPU by the emulator, against the reference in float64: with and without a bias. Instructions
that the emulator does not have are replaced by C++ here; pair masks have a test of their own in `test_backward_sm90.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import emulator
import pytest
import torch

from saccade.engine.philox import dropout_keep
from saccade.nm_sparse import reference
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import launchers as backward_sm90
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.masked import launchers as masked
from saccade.nvrtc import parameters_of

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

B, H, HKV, TQ, TK, D = 2, 4, 2, 150, 210, 64
LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
SHARED = """
inline void store_shared(u32 address, u32 x) { at_shared<u32>(address) = x; }
inline void store_shared(u32 address, u32 x, u32 y) { at_shared<u32>(address) = x, at_shared<u32>(address + 4) = y; }
inline u32 load_shared(u32 address) { return at_shared<u32>(address); }
template <class T>
void load_shared(u32 address, T& x, T& y) {
    if (address % 8) fail("two numbers are loaded from an address that is no multiple of 8");
    x = at_shared<T>(address), y = at_shared<T>(address + 4);
}
"""
PAIR_MASK = """
inline u32 pair_mask(u32 even, u32 odd, int i) { return (even >> (8 * i + 7) & 1) * 0xFFFFu | (odd >> (8 * i + 7) & 1) * 0xFFFF0000u; }
"""
# a product of a warpgroup is done when its four warps have issued it, which a release relies on
TOGETHER = """\
    meet_named(8 + threadIdx.x / 128, 128, false);
"""


def replaced(text: str, begin: str, end: str, instead: str) -> str:
    return text[: text.index(begin)] + instead + text[text.index(end) :]


@cache
def folder() -> Path:
    """The kernels with instructions of the emulator; a release waits for the warpgroup."""
    made, cuda = Path(mkdtemp(prefix="saccade-backward-")), backward_sm90.DQ.path.parent
    for name in ("backward.cuh", "tiles.cuh", "backward_dq_sm90.cu", "backward_dkv_sm90.cu"):
        text = (cuda / name).read_text()
        if name == "backward.cuh":
            text = replaced(text, "__device__ __forceinline__ void store_shared(u32 address, u32 value)", "// 16 ones", SHARED)
            text = replaced(
                text, "__device__ __forceinline__ u32 pair_mask", "__device__ __forceinline__ u32 even_bits", PAIR_MASK
            )
        release = "void release(const Shared& shared, int stage) {\n"
        assert text.count(release) == (name == "tiles.cuh")
        text = text.replace(release, release + TOGETHER)
        assert "asm" not in text, name
        (made / name).write_text(text)
    return made


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    def load(source, kernel, options, device, architecture):
        def configure(grid, block, shared_bytes):
            assert shared_bytes <= 232448
            call = SimpleNamespace(
                source=SimpleNamespace(path=folder() / source.path.name), kernel=kernel, options=options, grid=(grid, 1), threads=block,
                parameters=parameters_of(source, kernel, options),
            )  # fmt: skip
            return lambda **arguments: emulator.run(SimpleNamespace(**vars(call), arguments=arguments))

        return SimpleNamespace(configure=configure)

    monkeypatch.setattr(backward_sm90, "load", load)
    monkeypatch.setattr(fused, "tensor_map", emulator.tensor_map)


def drawn(dtype: torch.dtype = torch.bfloat16, hides: bool = True) -> torch.Tensor:
    """A bias that hides a key, a row and a tile by -inf."""
    bias = torch.randn(B, H, TQ, TK)
    if hides:
        bias[:, :, TQ // 2], bias[..., 5], bias[1, 2, :64, 64:128] = -torch.inf, -torch.inf, -torch.inf
    return bias.to(dtype)


# (bias, options)
BIASES = {
    "none": (lambda: None, {}),
    "none, causal, dropout": (lambda: None, {"is_causal": True, "dropout_p": 0.3}),
    "full": (drawn, {}),
    "full, 1:2, half": (lambda: drawn(torch.float16), {"pattern": (1, 2), "dtype": torch.float16}),
    "float32": (lambda: drawn(torch.float32), {}),
    "float32, D = 128": (lambda: drawn(torch.float32), {"dim": 128, "heads": 2}),
    "D = 128": (drawn, {"dim": 128, "heads": 2}),
    "D = 80": (drawn, {"dim": 80, "heads": 2}),
    "rank 2": (lambda: drawn()[0, 0], {}),
    "a batch row's": (lambda: drawn()[:, :1], {}),
    "a head's": (lambda: drawn()[:1], {}),
    "keys": (lambda: drawn()[:, :1, :1], {}),
    "keys of heads, float32": (lambda: drawn(torch.float32)[:1, :, :1], {}),
    "queries": (lambda: drawn()[..., 3:4], {}),
    "columns first": (lambda: drawn().mT.contiguous().mT, {}),
    "as long as tiles": (lambda: drawn()[:, :, :128, :128].clone(), {"q_len": 128, "kv_len": 128}),
    "causal": (drawn, {"is_causal": True}),
    "blocks": (drawn, {"blocks": True}),
    "dropout": (drawn, {"dropout_p": 0.3}),
    "everything": (lambda: drawn(torch.float32), {"is_causal": True, "blocks": True, "dropout_p": 0.3, "pattern": (1, 2)}),
}


def call_of(bias: torch.Tensor | None, **options) -> tuple[NMSparseArgs, torch.Tensor]:
    """(arguments, dout)."""
    q_len, kv_len, heads = options.get("q_len", TQ), options.get("kv_len", TK), options.get("heads", H)
    dim, dtype = options.get("dim", D), options.get("dtype", torch.bfloat16)
    kv_heads = heads // (H // HKV)
    sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, heads))
    query, key, value, dout = (torch.randn(B, n, h, dim).transpose(1, 2).to(dtype) for n, h in sizes)
    bias = bias[:, :heads] if bias is not None and bias.dim() == 4 else bias
    blocks = torch.rand(1, heads, -(-q_len // 64), -(-kv_len // 64)) < 0.6 if "blocks" in options else None
    seed = torch.tensor([77]) if "dropout_p" in options else None
    numbers = (*options.get("pattern", (2, 4)), options.get("dropout_p", 0.0), options.get("is_causal", False), dim**-0.5)
    return NMSparseArgs(query, key, value, None, bias, blocks, seed, *numbers), dout


def expected(args: NMSparseArgs, dout: torch.Tensor, dlse: torch.Tensor, dtype: torch.dtype):
    """(selection, out, lse, gradients) of the reference."""
    query, key, value = (x.to(dtype).requires_grad_() for x in args[:3])
    bias = None if args.bias is None else args.bias.to(dtype)
    with torch.no_grad():
        scores = reference.visible_scores(
            query, key, scale=args.scale, bias=bias, block_mask=args.block_mask, is_causal=args.is_causal
        )
        kept = reference.select(scores, args.pattern_n, args.pattern_m)
    survivors = None if args.seed is None else dropout_keep(args.seed, args.dropout_p, *kept.shape)
    out, lse = reference.attend(
        query, key, value, kept, scale=args.scale, bias=bias, survivors=survivors, dropout_p=args.dropout_p
    )
    seen = kept.any(-1)
    total = (out * dout).sum() + (lse.masked_fill(~seen, 0.0) * dlse).sum()
    return kept, out.detach(), lse.detach(), torch.autograd.grad(total, (query, key, value))


def check(args: NMSparseArgs, dout: torch.Tensor, dtype: torch.dtype = torch.float64, tolerance: float = 0.015) -> torch.Tensor:
    """Compares the gradients; returns the weights [B, H, Tq, Tk] as the kernel of the bias gradient computes them."""
    dlse = torch.randn(args.query.shape[:3])
    kept, out, lse, wanted = expected(args, dout, dlse, dtype)
    bits = reference.pack_selection(kept, args.pattern_m)
    delta = ((out * dout).sum(-1) - dlse).float().contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in args[:3])
    lse = lse.float().contiguous()
    corrections = backward_sm90.gradients(args, dout, lse, bits, delta, dq, dk, dv)
    for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), wanted, strict=True):
        bound = tolerance * y.abs().amax().item()
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
    if args.bias is None:
        assert corrections is None
        return kept
    scores = reference.visible_scores(args.query, args.key, scale=args.scale, bias=args.bias)
    return ((scores - lse[..., None]).exp() * corrections[..., None]).masked_fill(~kept, 0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BIASES)
def test_against_the_reference(kind):
    """Everything a bias may be, and may stand beside; queries and keys that are no whole tiles, grouped heads."""
    torch.manual_seed(3)
    make, options = BIASES[kind]
    args, dout = call_of(make(), **options)
    check(args, dout)


BLOCK_MASKS = {
    "rows and columns apart": lambda row, column: (row % 2 == 0) & (column != 3) & (row != 4),
    "columns apart": lambda row, column: ((column % 2 == 0) | (row == 7)) & (row != 3),
    "random": lambda row, column: (row == 0) | (column == 0) | (torch.rand(row.shape[0], column.shape[1]) < 0.2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"dim": 128}, {"is_causal": True}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("kind", BLOCK_MASKS)
def test_tiles_that_one_warpgroup_passes(kind, options):
    """More tiles in a row that only the other warpgroup sees than the ring has places, blocks that see nothing, and blocks that see all."""
    torch.manual_seed(6)
    q_len, kv_len = 650, 700
    args, dout = call_of(None, heads=2, q_len=q_len, kv_len=kv_len, **options)
    blocks = BLOCK_MASKS[kind](torch.arange(-(-q_len // 64))[:, None], torch.arange(-(-kv_len // 64))[None])
    check(args._replace(block_mask=blocks[None, None]), dout)


@pytest.mark.parametrize("value", [LEAST, -3e38, -1e9, 1e9, 3e38, MOST])
@pytest.mark.parametrize("where", ["row", "column", "most of a row"])
def test_a_bias_at_the_limits(where, value):
    """Next to such scores lse has lost the logarithm of the sum, and weights are divided by their sum."""
    torch.manual_seed(4)
    bias = drawn(torch.float32, False)
    if where == "column":
        bias[..., 3] = value
    else:
        bias[:, :, 70, int(where == "most of a row") :] = value
    args, dout = call_of(bias, heads=2)
    weights = check(args, dout, torch.float32, 0.02)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 2, TQ), rtol=2e-3, atol=2e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["full", "keys of heads, float32", "dropout", "limits"])
def test_the_gradient_of_a_bias(monkeypatch, kind):
    """All of backward: after the two kernels that of the masking family sums dS over the axes that the bias broadcasts, with the weights as the
    former corrected them."""
    monkeypatch.setattr(masked.backward_sm90, "takes", lambda args: True)
    torch.manual_seed(5)
    limits = kind == "limits"
    make, options = BIASES["float32" if limits else kind]
    bias = make()
    if limits:
        bias[:, :, 70], bias[:, :, 71] = LEAST, 1e9
    # Triton's interpreter has no products of bfloat16
    args, dout = call_of(bias.half() if bias.dtype == torch.bfloat16 else bias, **{**options, "heads": 2, "dtype": torch.float16})
    dtype, dlse = torch.float32 if limits else torch.float64, torch.randn(B, 2, TQ)
    leaf = args.bias.to(dtype).requires_grad_()
    kept, out, lse, _ = expected(args, dout, dlse, dtype)
    survivors = None if args.seed is None else dropout_keep(args.seed, args.dropout_p, *kept.shape)
    query, key, value = (x.to(dtype) for x in args[:3])
    found, sums = reference.attend(
        query, key, value, kept, scale=args.scale, bias=leaf, survivors=survivors, dropout_p=args.dropout_p
    )
    (wanted,) = torch.autograd.grad((found * dout).sum() + (sums.masked_fill(~kept.any(-1), 0.0) * dlse).sum(), leaf)
    bits = reference.pack_selection(kept, args.pattern_m)
    rounded, lse = out.to(args.query.dtype), lse.float().contiguous()
    *_, dbias = masked.backward(args, dout, dlse, rounded, lse, bits, bias_grad=True)
    assert dbias.dtype == args.bias.dtype
    assert dbias.shape == args.bias.shape
    torch.testing.assert_close(dbias.double(), wanted.double(), rtol=0, atol=0.02 * wanted.abs().amax().item())
