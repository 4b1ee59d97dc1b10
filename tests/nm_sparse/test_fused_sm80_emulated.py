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

from saccade.nm_sparse import reference
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.config import SELECT_EARLY, SELECT_UNORDERED, Sm80Config, pick_sm80

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
"""


@cache
def source() -> Path:
    """The kernel compiled with the emulator's instructions."""
    folder, cuda = Path(mkdtemp(prefix="saccade-fused-")), fused.SM80.path.parent
    for name in ("fused_sm80.cu", "rows.cuh", "selection.cuh", "tiles_half.cuh", "tile_copies.cuh", "metadata.cuh"):
        text = (cuda / name).read_text()
        if name == "selection.cuh":
            text = text[: text.index("// exponents x and y of the two kept weights")] + SELECT
        (folder / name).write_text(text)
    return folder / "fused_sm80.cu"


def run(monkeypatch, args: NMSparseArgs, config: Sm80Config, early: bool):
    """(out, lse, kept), from poisoned memory but for kept, as the launcher does it. early: copies happen at once."""

    def load(_, kernel, parameters, options, device):
        def configure(grid, block, shared_bytes):
            assert shared_bytes <= 232448
            defines = (*options.defines, *[("EARLY_COPIES", "1")] * early)
            call = SimpleNamespace(
                source=SimpleNamespace(path=source()),
                kernel=kernel,
                parameters=parameters,
                options=SimpleNamespace(defines=defines),
                grid=(grid, 1),
                threads=block,
            )
            return lambda **arguments: emulator.run(SimpleNamespace(**vars(call), arguments=arguments))

        return SimpleNamespace(configure=configure)

    monkeypatch.setattr(fused, "load", load)
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
