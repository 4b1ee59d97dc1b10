"""The sm_80 form of the fused kernel, run on a CPU by the emulator. Warps run as far ahead of each other as they may, and copies
arrive as late as they may, or at once, so that a place of a tile that is read or overwritten too early shows. The selection is
replaced by C++ here; its instructions are tested in `test_selection.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import emulator
import pytest
import torch

from saccade.engine.philox import dropout_keep
from saccade.nm_sparse import bias_rows, key_bits, query_bits, reference
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.config import SELECT_EARLY, SELECT_UNORDERED, Sm80Config, pick_sm80
from saccade.nvrtc import parameters_of

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

SELECT = """
template <int UNIT>
void select_four(float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    const float m1 = max_nan(a, b), n1 = min_nan(a, b), m2 = max_nan(c, d), n2 = min_nan(c, d);
    const bool first = !PAIRS && n1 >= m2, second = !PAIRS && n2 > m1;
    float kept = second ? c : first ? a : m1, other = first ? b : second ? d : m2;
    float code = first ? 4 : second ? 14 : 8 + (b > a) + 4 * (d > c);
    if (SELECTION == SELECT_UNORDERED && !PAIRS) {
        kept = second ? n2 : m1, other = first ? n1 : m2;
        code = second ? 11 + 3 * (d > c) : first ? 4 - 3 * (b > a) : code;
    }
    x = fmaf(kept, scale, offset), y = fmaf(other, scale, offset);
    codes += (code - (CODES_BEGIN > CODES_ZERO ? 8 : 0)) * UNIT;
}
template <int UNIT>
void select_pair(float a, float b, float scale, float offset, float& x, float& codes) {
    x = fmaf(max_nan(a, b), scale, offset);
    codes += (b > a ? 10 : 0) * UNIT;
}
"""
# shared memory as float32 reads it, in place of instructions
WORDS = """
u32 load_word(u32 address) { return at_shared<u32>(address); }
"""
FOURS = """
void load_16(float (&x)[4], u32 address) { for (int i = 0; i < 4; i++) x[i] = at_shared<float>(address + 4 * i); }
void store_rounded(u32 address, const float (&x)[4]) { for (int i = 0; i < 4; i++) at_shared<u32>(address + 4 * i) = to_tf32(x[i]); }
"""


@cache
def source() -> Path:
    """The kernel compiled with the emulator's instructions."""
    folder, cuda = Path(mkdtemp(prefix="saccade-fused-")), fused.SM80.path.parent
    for name in (
        "fused_sm80.cu",
        "rows.cuh",
        "selection.cuh",
        "tiles_half.cuh",
        "tiles_tf32.cuh",
        "tile_copies.cuh",
        "metadata.cuh",
    ):
        text = (cuda / name).read_text()
        if name == "tiles_tf32.cuh":
            text = without(text, "__device__ __forceinline__ u32 load_word", "static_assert(TALL", WORDS)
            text = without(text, "__device__ __forceinline__ void load_16", "// Rounded once in place", FOURS)
        if name == "selection.cuh":
            text = text[: text.index("// exponents x and y of the two kept weights")] + SELECT
        (folder / name).write_text(text)
    return folder / "fused_sm80.cu"


def without(text: str, begin: str, end: str, instead: str) -> str:
    """A source in which the lines from one text up to another are replaced."""
    return text[: text.index(begin)] + instead + text[text.index(end) :]


def emulate(monkeypatch, early: bool) -> None:
    """Let the emulator run what the launchers load. early: copies happen at once."""

    def load(original, kernel, options, device):
        def configure(grid, block, shared_bytes):
            assert shared_bytes <= 232448
            defines = (*options.defines, *[("EARLY_COPIES", "1")] * early)
            call = SimpleNamespace(
                source=SimpleNamespace(path=source()),
                kernel=kernel,
                parameters=parameters_of(original, kernel, options),
                options=SimpleNamespace(defines=defines),
                grid=(grid, 1),
                threads=block,
            )
            return lambda **arguments: emulator.run(SimpleNamespace(**vars(call), arguments=arguments))

        return SimpleNamespace(configure=configure)

    monkeypatch.setattr(fused, "load", load)


def run(monkeypatch, args: NMSparseArgs, config: Sm80Config, early: bool):
    """(out, lse, kept), from poisoned memory but for kept, as the launcher does it. early: copies happen at once."""
    emulate(monkeypatch, early)
    query, key = args.query, args.key
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    kept = torch.zeros(*query.shape[:3], -(-key.shape[2] // 32), dtype=torch.int32)
    fused.launch_sm80(args, config, out, lse, kept)
    return out, lse, kept


def bits_of(kept: torch.Tensor) -> torch.Tensor:
    """Words of 32 keys, as the kernel stores them."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    words = (padded << torch.arange(32)).sum(-1)
    return (words - (words >= 2**31) * 2**32).int()


def shape(warps: int, stages: int, selection: int = SELECT_UNORDERED, head_dim: int = 64) -> Sm80Config:
    return Sm80Config(warps, stages, 8 // warps, 2, head_dim // 16, 2, selection=selection)


CASES = [
    ("2:4", False, 300, 333, shape(8, 4)),
    ("2:4", True, 333, 333, shape(4, 4)),
    ("2:4", True, 300, 150, shape(4, 3)),  # queries whose keys all lie behind them
    ("2:4", False, 150, 200, shape(8, 3)),
    ("2:4", True, 40, 300, shape(8, 4, SELECT_EARLY)),  # warps without queries
    ("1:2", True, 200, 200, shape(4, 4, SELECT_EARLY)),
    ("1:2", False, 33, 31, shape(8, 3, SELECT_EARLY)),
    ("2:4", True, 300, 300, Sm80Config(8, 3, tall=2, selection=SELECT_UNORDERED)),  # as at D = 128
    ("2:4", False, 270, 140, Sm80Config(8, 2, tall=2, selection=SELECT_UNORDERED)),
    ("2:4", True, 140, 140, Sm80Config(4, 2)),
    ("2:4", True, 140, 140, Sm80Config(8, 1)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["ties", "grows"])
@pytest.mark.parametrize(("pattern", "is_causal", "q_len", "kv_len", "config"), CASES)
def test_against_the_reference(monkeypatch, pattern, is_causal, q_len, kv_len, config, kind):
    """ties: scores are whole numbers, so that the selection is the reference's. grows: later tiles raise the reference of the
    weights; copies at once."""
    torch.manual_seed(0)
    dtype = torch.float16 if kind == "ties" and config.warps == 4 else torch.bfloat16
    query, key, value = (torch.randn(1, n, 2, 64).transpose(1, 2) for n in (q_len, kv_len, kv_len))
    query, key = (x.clamp(-1.4, 1.4).round() for x in (query, key))
    if kind == "grows":
        key = key * torch.linspace(24, 0, kv_len).round()[:, None]
    query, key, value = (x.to(dtype) for x in (query, key, value))
    keep, group = map(int, pattern.split(":"))
    args = NMSparseArgs(query, key, value, None, None, None, None, keep, group, 0.0, is_causal, 0.25)
    out, lse, kept = run(monkeypatch, args, config, kind == "grows")
    scores = reference.visible_scores(query.double(), key.double(), scale=0.25, is_causal=is_causal)
    wanted_kept = reference.select(scores, keep, group)
    wanted = reference.attend(query.double(), key.double(), value.double(), wanted_kept, scale=0.25)
    assert torch.equal(kept, bits_of(wanted_kept))
    torch.testing.assert_close(out.double(), wanted[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), wanted[1].double(), rtol=1e-5, atol=1e-4)


def test_the_cases_are_the_shapes_that_are_chosen():
    cases = {(c.warps, c.stages, c.tall, c.parts) for *_, c in CASES}
    for arch in (80, 86, 90, 120):
        for head_dim in (64, 128):
            for keep in (1, 2):
                for is_causal in (False, True):
                    chosen = pick_sm80(head_dim, arch, keep, is_causal)
                    assert (chosen.warps, chosen.stages, chosen.tall, chosen.parts) in cases


B, H, HKV, TQ, TK = 2, 4, 2, 70, 150


def drawn(q_len: int = TQ, kv_len: int = TK) -> torch.Tensor:
    """A mask in which a row, a key of all heads, a head and whole tiles are hidden."""
    mask = torch.rand(B, H, q_len, kv_len) < 0.6
    mask[:, :, q_len // 2] = False
    mask[..., 5] = False
    mask[1, 2] = False
    mask[0, :, :64, 64:128] = False
    mask[0, 3, :, 64:] = False
    return mask


def window(q_len: int = TQ, kv_len: int = TK) -> torch.Tensor:
    """Each query sees 9 keys; tiles far from them are hidden from all."""
    return (torch.arange(q_len)[:, None] * 2 - torch.arange(kv_len)).abs() < 5


LENGTHS = (torch.arange(TK) < torch.tensor([90, 0])[:, None])[:, None, None]
HALF = Sm80Config(4, 2, 2)
# (mask, options, dtype, configuration)
MASKS = {
    "full": (drawn, {}, torch.bfloat16, HALF),
    "full, 1:2": (drawn, {"pattern": (1, 2)}, torch.float16, HALF),
    "rank 2": (lambda: drawn()[0, 0], {}, torch.bfloat16, HALF),
    "a batch row's": (lambda: drawn()[:, :1], {}, torch.float16, HALF),
    "a head's keys": (lambda: drawn()[:1, :, :1], {}, torch.bfloat16, HALF),
    "a query's": (lambda: drawn()[:, :1, :, 3:4], {}, torch.bfloat16, HALF),
    "columns first": (lambda: drawn().mT.contiguous().mT, {}, torch.bfloat16, HALF),
    "expanded": (lambda: drawn()[:1, :1].expand(B, H, -1, -1), {}, torch.bfloat16, HALF),
    "keys, expanded": (lambda: drawn()[:, :1, :1].expand(B, H, TQ, -1), {}, torch.bfloat16, HALF),
    "window": (window, {}, torch.bfloat16, HALF),
    "lengths, causal": (lambda: LENGTHS, {"is_causal": True}, torch.bfloat16, HALF),
    "lengths, causal, 1:2": (lambda: LENGTHS, {"is_causal": True, "pattern": (1, 2)}, torch.bfloat16, HALF),
    "mask within lengths, causal": (lambda: drawn() & LENGTHS, {"is_causal": True}, torch.float16, HALF),
    "blocks": (drawn, {"blocks": True}, torch.bfloat16, HALF),
    "dropout": (drawn, {"dropout_p": 0.3}, torch.bfloat16, HALF),
    "everything": (drawn, {"is_causal": True, "blocks": True, "dropout_p": 0.3, "pattern": (1, 2)}, torch.bfloat16, HALF),
    "long queries": (lambda: drawn(140), {"q_len": 140, "blocks": True}, torch.bfloat16, Sm80Config(8, 2)),
    "one stage": (lambda: drawn(140), {"q_len": 140, "is_causal": True}, torch.bfloat16, Sm80Config(8, 1)),
    "one query": (lambda: drawn(1), {"q_len": 1}, torch.bfloat16, HALF),
    "float32": (drawn, {"pattern": (1, 2)}, torch.float32, Sm80Config(8, 2, tf32=True)),
    "float32, everything": (
        drawn, {"is_causal": True, "blocks": True, "dropout_p": 0.3, "pattern": (1, 2)}, torch.float32, Sm80Config(8, 1, tf32=True),
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_against_the_reference(monkeypatch, kind):
    """The whole forward with a mask, packing included. Scores are whole numbers, so that the selection is the reference's. Keys that no
    query sees, and their values, hold NaN."""
    make, options, dtype, config = MASKS[kind]
    torch.manual_seed(1)
    mask, q_len, is_causal = make(), options.get("q_len", TQ), options.get("is_causal", False)
    query, key, value = (torch.randn(B, n, h, 16).transpose(1, 2) for n, h in ((q_len, H), (TK, HKV), (TK, HKV)))
    query, key = (x.clamp(-1.4, 1.4).round() for x in (query, key))
    blocks = torch.rand(1, H, -(-q_len // 64), -(-TK // 64)) < 0.6 if "blocks" in options else None
    seed = torch.tensor([77]) if "dropout_p" in options else None
    seen = mask[(None,) * (4 - mask.dim())].expand(B, H, q_len, TK)
    seen = seen & torch.ones(q_len, TK, dtype=torch.bool).tril() if is_causal else seen
    hidden = ~seen.unflatten(1, (HKV, -1)).any(3).any(2)
    assert hidden.any() or kind in ("a query's", "one query", "window")
    key, value = (x.masked_fill(hidden[..., None], torch.nan).to(dtype) for x in (key, value))
    numbers = (*options.get("pattern", (2, 4)), options.get("dropout_p", 0.0), is_causal, 0.25)
    args = NMSparseArgs(query.to(dtype), key, value, mask, None, blocks, seed, *numbers)
    out, lse, kept = forward(monkeypatch, args, config)
    wanted, wanted_lse, wanted_kept = expected(args)
    assert torch.equal(kept, bits_of(wanted_kept))
    blind = ~wanted_kept.any(-1)
    assert torch.equal(lse == -torch.inf, blind)
    assert not out[blind].any()
    torch.testing.assert_close(out.double(), wanted, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-5, atol=1e-4)


def forward(monkeypatch, args: NMSparseArgs, config: Sm80Config):
    """(out, lse, kept) of the launchers' own forward on the emulator."""
    emulate(monkeypatch, False)
    for module in (bias_rows, key_bits, query_bits):
        monkeypatch.setattr(module, "run", lambda make, tensors, options, about: emulator.launch(make, tensors, *options, None))
    monkeypatch.setattr(fused, "arch_of", lambda device: 80)
    monkeypatch.setattr(fused, "pick_sm80", lambda *call: config)
    return fused.forward(args, True)


def expected(args: NMSparseArgs):
    """(out, lse, kept) of the reference in float64; the selection of its scores alone."""
    query, key, value = (x.double() for x in args[:3])
    scores = reference.visible_scores(
        query, key, scale=args.scale, mask=args.mask, bias=args.bias, block_mask=args.block_mask, is_causal=args.is_causal
    )
    kept = reference.select(scores, args.pattern_n, args.pattern_m)
    survivors = None
    if args.seed is not None:
        survivors = dropout_keep(args.seed, args.dropout_p, *kept.shape)
    found = reference.attend(
        query, key, value, kept, scale=args.scale, bias=args.bias, survivors=survivors, dropout_p=args.dropout_p
    )
    return *found, kept


def biased(q_len: int = TQ, kv_len: int = TK, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A bias of quarters that hides a key, a row, and tiles by -inf."""
    bias = (4 * torch.randn(B, H, q_len, kv_len)).round().clamp(-8, 8) / 4
    return bias.masked_fill(~drawn(q_len, kv_len), -torch.inf).to(dtype)


SHOWN = lambda: biased().clamp(min=-2)  # noqa: E731
# (bias, options, dtype, configuration)
BIASES = {
    "full": (biased, {}, torch.bfloat16, HALF),
    "full, 1:2": (lambda: biased(dtype=torch.float16), {"pattern": (1, 2)}, torch.float16, HALF),
    "float32": (lambda: biased(dtype=torch.float32), {}, torch.bfloat16, HALF),
    "float32, 1:2": (lambda: biased(dtype=torch.float32), {"pattern": (1, 2)}, torch.float16, HALF),
    "float64": (lambda: biased(dtype=torch.float64), {}, torch.bfloat16, HALF),
    "nothing hidden": (SHOWN, {}, torch.bfloat16, HALF),
    "rank 2": (lambda: biased()[0, 0], {}, torch.bfloat16, HALF),
    "a batch row's": (lambda: biased()[:, :1], {}, torch.float16, HALF),
    "a head's": (lambda: biased()[:1], {}, torch.bfloat16, HALF),
    "keys": (lambda: biased()[:, :1, :1], {}, torch.bfloat16, HALF),
    "keys of heads, float32": (lambda: biased(dtype=torch.float32)[:1, :, :1], {}, torch.bfloat16, HALF),
    "queries": (lambda: biased()[..., 3:4], {}, torch.bfloat16, HALF),
    "columns first": (lambda: biased().mT.contiguous().mT, {}, torch.bfloat16, HALF),
    "expanded": (lambda: SHOWN()[:1, :, :1].expand(B, H, TQ, -1), {}, torch.bfloat16, HALF),
    "a slice": (lambda: biased(kv_len=TK + 10)[..., 2:-8], {}, torch.bfloat16, HALF),
    "keys by sixteens": (lambda: biased(kv_len=144), {"kv_len": 144}, torch.bfloat16, HALF),
    "causal": (SHOWN, {"is_causal": True}, torch.bfloat16, HALF),
    "lengths": (biased, {"mask": LENGTHS}, torch.bfloat16, HALF),
    "lengths, causal": (biased, {"mask": LENGTHS, "is_causal": True}, torch.bfloat16, HALF),
    "blocks": (biased, {"blocks": True}, torch.bfloat16, HALF),
    "dropout": (biased, {"dropout_p": 0.3}, torch.bfloat16, HALF),
    "everything": (
        biased, {"mask": LENGTHS, "is_causal": True, "blocks": True, "dropout_p": 0.3, "pattern": (1, 2)}, torch.bfloat16, HALF,
    ),
    "long queries": (lambda: biased(140), {"q_len": 140}, torch.bfloat16, Sm80Config(8, 2)),
    "one stage": (lambda: biased(140), {"q_len": 140, "is_causal": True}, torch.bfloat16, Sm80Config(8, 1)),
    "one query": (lambda: biased(1), {"q_len": 1}, torch.bfloat16, HALF),
    "as TF32": (lambda: biased(dtype=torch.float32), {"pattern": (1, 2)}, torch.float32, Sm80Config(8, 2, tf32=True)),
    "as TF32, everything": (
        lambda: biased(dtype=torch.float32), {"mask": LENGTHS, "is_causal": True, "dropout_p": 0.3, "pattern": (1, 2)}, torch.float32,
        Sm80Config(8, 1, tf32=True),
    ),
}  # fmt: skip


def biased_call(kind: str) -> NMSparseArgs:
    """The arguments of a case of `BIASES`. Scores are quarters, so that the selection is the reference's. Values of keys that the bias
    hides from all queries hold NaN."""
    make, options, dtype, _ = BIASES[kind]
    torch.manual_seed(1)
    bias, q_len, kv_len = make(), options.get("q_len", TQ), options.get("kv_len", TK)
    is_causal, mask = options.get("is_causal", False), options.get("mask")
    query, key, value = (torch.randn(B, n, h, 16).transpose(1, 2) for n, h in ((q_len, H), (kv_len, HKV), (kv_len, HKV)))
    query, key = (x.clamp(-1.4, 1.4).round() for x in (query, key))
    blocks = torch.rand(1, H, -(-q_len // 64), -(-kv_len // 64)) < 0.6 if "blocks" in options else None
    seed = torch.tensor([77]) if "dropout_p" in options else None
    seen = (bias > -torch.inf)[(None,) * (4 - bias.dim())].expand(B, H, q_len, kv_len)
    hidden = ~seen.unflatten(1, (HKV, -1)).any(3).any(2)
    value = value.masked_fill(hidden[..., None], torch.nan).to(dtype)
    numbers = (*options.get("pattern", (2, 4)), options.get("dropout_p", 0.0), is_causal, 0.25)
    return NMSparseArgs(query.to(dtype), key.to(dtype), value, mask, bias, blocks, seed, *numbers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BIASES)
def test_biases_against_the_reference(monkeypatch, kind):
    """The whole forward with a bias: every form it may have, and beside every feature."""
    args = biased_call(kind)
    out, lse, kept = forward(monkeypatch, args, BIASES[kind][3])
    wanted, wanted_lse, wanted_kept = expected(args)
    assert torch.equal(kept, bits_of(wanted_kept))
    blind = ~wanted_kept.any(-1)
    assert torch.equal(lse == -torch.inf, blind)
    assert not out[blind].any()
    torch.testing.assert_close(out.double(), wanted, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-5, atol=1e-4)


def test_a_value_that_a_bias_and_the_causal_mask_hide_together(monkeypatch):
    """Queries before key 6 see it by the bias, and later ones by the causal mask. A group without a visible key multiplies a value by 0."""
    query, key, value = (torch.randn(1, 1, 8, 16) for _ in range(3))
    bias = torch.zeros(1, 1, 8, 8)
    bias[..., 6:, 6], value[..., 6, :] = -torch.inf, torch.nan
    args = NMSparseArgs(query, key, value, None, bias, None, None, 1, 2, 0.0, True, 0.25)
    out, *_ = forward(monkeypatch, args, Sm80Config(8, 2, tf32=True))
    torch.testing.assert_close(out.double(), expected(args)[0], rtol=0.01, atol=0.01)


def test_a_value_that_a_bias_and_the_block_mask_hide_together(monkeypatch):
    """The first 64 queries see keys 6 and 7 by the block mask alone, later ones by the bias alone."""
    query, key, value = (torch.randn(1, 1, n, 16) for n in (128, 70, 70))
    bias, blocks = torch.zeros(1, 1, 128, 70), torch.tensor([[[[True, False], [False, True]]]])
    bias[..., :64, 6:8], value[..., 6, :] = -torch.inf, torch.nan
    args = NMSparseArgs(query, key, value, None, bias, blocks, None, 1, 2, 0.0, False, 0.25)
    out, *_ = forward(monkeypatch, args, Sm80Config(8, 2, tf32=True))
    torch.testing.assert_close(out.double(), expected(args)[0], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_a_value_that_a_mask_and_the_block_mask_hide_together(monkeypatch, by_head, is_causal):
    """One of two rows of blocks, or heads that share keys, sees keys 6 and 7 by the block mask alone, the other by the mask alone."""
    query, key, value = (torch.randn(1, h, n, 16) for h, n in ((2, 128), (1, 70), (1, 70)))
    mask, blocks = torch.ones(1, 2, 128, 70, dtype=torch.bool), torch.ones(1, 2, 2, 2, dtype=torch.bool)
    if by_head:
        mask, blocks[:, 1, :, 0] = mask[:, :, :1].clone(), False
        mask[:, 0, :, 6:8] = False
    else:
        mask[:, :, :64, 6:8], blocks[:, :, 1, 0] = False, False
    value[..., 6:8, :] = torch.nan
    args = NMSparseArgs(query, key, value, mask, None, blocks, None, 1, 2, 0.0, is_causal, 0.25)
    out, *_ = forward(monkeypatch, args, Sm80Config(8, 2, tf32=True))
    torch.testing.assert_close(out.double(), expected(args)[0], rtol=0.01, atol=0.01)


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("value", [LEAST, -3e38, -1e9, 1e9, 3e38, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("where", ["row", "column", "most of a row", "mixed"])
def test_a_bias_at_the_limits(monkeypatch, where, value):
    """Only -inf hides a key: a row of such a bias gives the mean of the values that it keeps."""
    torch.manual_seed(2)
    bias = torch.randn(B, H, TQ, TK)
    if where == "column":
        bias[..., 3] = value
    else:
        bias[:, :, 2, int(where == "most of a row") :] = value
    if where == "mixed":
        bias[:, :, 2, 64:140] = -torch.inf if value < 0 else LEAST
    query, key, dout = (torch.randn(B, h, n, 16).bfloat16() for h, n in ((H, TQ), (HKV, TK), (HKV, TK)))
    args = NMSparseArgs(query, key, dout, None, bias, None, None, 2, 4, 0.0, False, 0.25)
    out, lse, kept = forward(monkeypatch, args, HALF)
    found = reference.unpack_selection(kept, 4, TK)
    wanted, wanted_lse = reference.attend(*(x.float() for x in args[:3]), found, scale=0.25, bias=bias)
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)
    # a query with such a row keeps what the reference keeps: its products are lost in rounding there, and here
    scores = reference.visible_scores(query, key, scale=0.25, bias=bias)
    chosen = reference.select(scores, 2, 4)
    assert torch.equal(found[:, :, 2], chosen[:, :, 2]) or where == "column" or where == "mixed"
