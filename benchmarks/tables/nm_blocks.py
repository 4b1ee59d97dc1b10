"""N:M pruning inside BigBird's blocks (Dfss, Fig. 18 A) against N:M without blocks, FlexAttention with the same blocks, and dense SDPA.

The shapes of `nm_fused` at n = 4,096 and 16,384, all through public functions on leaves that require gradients; `hybrid` and
`unmasked` take whatever backend `auto` takes, which their notes name. Tiles that the block mask hides should cost nothing: the note
of a hybrid row has the visible share of the tiles, and its time over that share of the unmasked call's time in the same run, which
should be at most 1.15. FlexAttention is dense within the blocks; it is compiled with tuning, since without it no configuration of
its backward has tiles as small as the blocks on sm_90, and its note names the tiles that it ran with. Calls take turns as in
`nm_fused`. `tflops` and `roof_ms` count the visible tiles alone; otherwise they are those of `nm_fused`.

Before anything is timed, forward and backward of the hybrid are compared with the reference in float64 at n = 1,024. Its inputs are
small integers, so that scores are exact and every backend must select the same keys; a result beyond its budget ends the table.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from peers import peers
from rows import Row, Writer
from steps import step, those_that_run
from tables.nm_fused import PATTERNS, PEAK_TFLOPS, Setting, in_turn
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import saccade
from saccade.engine.dispatch import choose
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.problem import BLOCK, describe_nm_sparse, parse_pattern
from saccade.nm_sparse.reference import select, visible_scores
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.nm_sparse.testing.inputs import make_ties
from saccade.testing.baseline import Outputs, baseline_of, differentiate
from saccade.testing.inputs import Inputs
from saccade.testing.judge import Result, judge_all
from saccade.testing.roundings import IN_PIECES
from saccade.testing.timing import Timing

DEVICE = "cuda"
MOST = 1.15  # time of a hybrid call over the visible share of the unmasked call's
CHECKED = 1024  # the length of the comparison with float64
SETTINGS = [Setting(n, d, False) for d in (128, 64) for n in (4096, 16384)]


@dataclass(frozen=True)
class BigBird:
    """The blocks of 64 keys that each block of 64 queries sees, the same for all heads. window: blocks around the diagonal, the own
    one among them; global_blocks: the first ones, which see all and are seen by all; random_blocks: further ones of each row."""

    window: int = 3
    global_blocks: int = 1
    random_blocks: int = 3
    seed: int = 0

    def mask(self, length: int) -> Tensor:
        """bool `[1, 1, length / 64, length / 64]`, the same in every run."""
        source = torch.Generator().manual_seed(self.seed)
        place = torch.arange(length // BLOCK)
        seen = (place - place[:, None]).abs() <= self.window // 2
        seen |= (place < self.global_blocks) | (place[:, None] < self.global_blocks)
        for row in seen:
            hidden = (~row).nonzero().flatten()
            row[hidden[torch.randperm(len(hidden), generator=source)[: self.random_blocks]]] = True
        return seen[None, None]

    def __str__(self) -> str:
        return f"window={self.window} global={self.global_blocks} random={self.random_blocks} seed={self.seed}"


BIGBIRD = BigBird()


def visible_share(blocks: Tensor) -> float:
    """The share of the pairs of queries and keys that whole blocks leave visible."""
    return blocks.double().mean().item()


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: its problem without the blocks."""
    return row["problem"].partition(f" {BLOCK}x{BLOCK} ")[0]


def run(writer: Writer, repeat_ms: int) -> None:
    """Compare with float64; then each setting, forward and forward plus backward, all implementations in turn."""
    ratios = {(pattern, dim): compared(pattern, dim) for pattern in PATTERNS for dim in sorted({s.dim for s in SETTINGS})}
    for setting in writer.part.cases(every_case()):
        leaves, dout = _leaves(setting)
        blocks = BIGBIRD.mask(setting.length).to(DEVICE)
        calls, notes = _calls(leaves, dout, blocks)
        for direction in ("fwd", "fwd+bwd"):
            times = in_turn({name: step(call, direction, leaves, dout) for name, call in calls.items()}, repeat_ms)
            for pattern in PATTERNS:
                notes |= _notes(pattern, leaves, blocks, direction, times)
            for name, timing in times.items():
                error = ratios[name.split()[-1], setting.dim][direction] if name.startswith("hybrid") else ""
                _write(writer, setting, blocks, name, direction, timing, notes[name], error)
            print(_line(setting, direction, times, notes), flush=True)
        del leaves, dout, blocks, calls
        gc.collect()


def compared(pattern: str, dim: int) -> dict[str, float]:
    """Error over budget of the hybrid against float64, by direction: of out and lse, and of the gradients too.

    Raises:
        SystemExit: a result is beyond its budget, so that no time of a wrong result is written.
    """
    results = judged(pattern, dim)
    failed = [str(result) for result in results if not result.ok]
    if failed:
        raise SystemExit(f"hybrid {pattern} at D = {dim} differs from float64, nothing is timed: " + "; ".join(failed))
    forward = max(result.ratio for result in results if result.name in ("out", "lse"))
    return {"fwd": forward, "fwd+bwd": max(result.ratio for result in results)}


def judged(pattern: str, dim: int) -> list[Result]:
    """out, lse, dq, dk and dv of the hybrid at a small size, beside the reference in float64 and the budget of plain torch."""
    case = NMSparseCase("hybrid", 2, 2, 2, CHECKED, CHECKED, dim, pattern=pattern)
    inputs = make_ties(case, torch.bfloat16, DEVICE)
    blocks = BIGBIRD.mask(CHECKED).to(DEVICE)
    exact = inputs.to(torch.float64)
    found, expected = (_differentiated(x, pattern, blocks, name) for x, name in ((inputs, "auto"), (exact, "reference")))
    kept = select(visible_scores(exact.query, exact.key, scale=dim**-0.5, block_mask=blocks), *parse_pattern(pattern))
    under = Inputs(inputs.query, inputs.key, inputs.value, kept, None, None, inputs.dout, None)
    return judge_all(found, expected, baseline_of(case, under, 0, True, IN_PIECES), torch.bfloat16)


def _differentiated(inputs: Inputs, pattern: str, blocks: Tensor, backend: str) -> Outputs:
    def attend(x: Inputs) -> tuple[Tensor, Tensor]:
        return saccade.nm_sparse_attention(
            x.query, x.key, x.value, pattern=pattern, block_mask=blocks, return_lse=True, backend=backend
        )

    return differentiate(attend, inputs, 0, True)


def _leaves(setting: Setting) -> tuple[list[Tensor], Tensor]:
    """query, key, value; and the gradient of the output."""
    made = [torch.randn(setting.sizes, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def _calls(leaves: list[Tensor], dout: Tensor, blocks: Tensor) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """(ours, and the peers that run; what the rows of peers note)."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for pattern in PATTERNS:
        ours = functools.partial(saccade.nm_sparse_attention, *leaves, pattern=pattern)
        calls |= {f"unmasked {pattern}": ours, f"hybrid {pattern}": functools.partial(ours, block_mask=blocks)}
    # slower than the others on this GPU at every length
    dense = {name: functools.partial(peer, *leaves) for name, peer in peers().items() if name != "sdpa_efficient"}
    dense = those_that_run(dense, leaves, dout)
    notes = dict.fromkeys(dense, "dense")
    for tile in (BLOCK, 2 * BLOCK):
        attend, mask = compiled_flex(), flex_blocks(blocks, tile)
        flex = those_that_run({"flex": functools.partial(attend, *leaves, block_mask=mask)}, leaves, dout)
        if flex:
            return calls | dense | flex, notes | {"flex": f"dense within the blocks, its tiles {tile}"}
    return calls | dense, notes


def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention compiled for one shape, with tuning."""
    # shapes that were compiled before would count towards the limit of recompilations
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")


def flex_blocks(blocks: Tensor, tile: int) -> BlockMask:
    """The blocks for FlexAttention, in tiles of 64 or a multiple of it; a tile that holds hidden blocks too is masked inside."""
    every = tile // BLOCK
    parts = blocks.unflatten(3, (-1, every)).unflatten(2, (-1, every)).transpose(3, 4).flatten(4)
    whole, some, seen = parts.all(-1), parts.any(-1) & ~parts.all(-1), blocks[0, 0]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[query // BLOCK, key // BLOCK]

    return BlockMask.from_kv_blocks(*_listed(some), *_listed(whole), BLOCK_SIZE=tile, mask_mod=visible)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(how many tiles of keys each row has, their indices ahead of all others), int32."""
    return tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()


def _notes(pattern: str, leaves: list[Tensor], blocks: Tensor, direction: str, times: dict[str, Timing]) -> dict[str, str]:
    """The notes in the rows of ours: the backend that `auto` takes, and of the hybrid its share and how it uses it."""
    unmasked, hybrid = (_taken(pattern, leaves, given, direction != "fwd") for given in (None, blocks))
    share = visible_share(blocks)
    ratio = times[f"hybrid {pattern}"].p50 / (share * times[f"unmasked {pattern}"].p50)
    verdict = "within" if ratio <= MOST else "over"
    said = f"auto takes {hybrid}, visible {share:.4f}, {ratio:.2f} of that share of unmasked, {verdict} {MOST}"
    return {f"unmasked {pattern}": f"auto takes {unmasked}", f"hybrid {pattern}": said}


def _taken(pattern: str, leaves: list[Tensor], blocks: Tensor | None, needs_grad: bool) -> str:
    """The backend that `auto` takes. Asked after the calls ran, so that one whose kernel did not compile is not named."""
    problem = describe_nm_sparse(*leaves, None, 0.0, False, None, False, pattern, blocks, None, False, needs_grad)
    return choose(BACKENDS, problem).backend.name


def _write(
    writer: Writer, setting: Setting, blocks: Tensor, name: str, direction: str, timing: Timing, note: str, error: float | str
) -> None:
    factor = 1.0 if direction == "fwd" else 3.5
    # a pruned forward needs three quarters of the products at the doubled rate; backward is dense
    needed = factor - 0.25 if name.startswith(("unmasked", "hybrid")) else factor
    flops = setting.flops * (visible_share(blocks) if name.startswith(("hybrid", "flex")) else 1.0)
    problem = f"{setting} {BLOCK}x{BLOCK} blocks={blocks.shape[-1]} {BIGBIRD} visible={visible_share(blocks):.4f}"
    writer.add(
        Row(
            "nm_blocks", problem, name, direction, "bf16", *timing, roof_ms=needed * flops / PEAK_TFLOPS / 1e9,
            tflops=factor * flops / timing.p50 / 1e9, error_ratio=error, note=note,
        )
    )  # fmt: skip


def _line(setting: Setting, direction: str, times: dict[str, Timing], notes: dict[str, str]) -> str:
    """Times of ours with their notes, and how often faster than each peer."""
    words = [f"D={setting.dim:3d} n={setting.length:5d} {direction}"]
    for pattern in PATTERNS:
        ours = times[f"hybrid {pattern}"].p50
        others = {name: t for name, t in times.items() if not name.startswith("hybrid")}
        gains = " ".join(f"{t.p50 / ours:.2f} {name}" for name, t in others.items())
        words.append(f"hybrid {pattern} {ours:.3f} ms ({notes[f'hybrid {pattern}']}) x {gains}")
    return "  ".join(words)
