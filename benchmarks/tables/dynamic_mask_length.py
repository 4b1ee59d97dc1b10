"""Dynamic mask attention as a function of the length, against the best dense kernels: forward and backward with selection, and
peak memory.

Times are of the public function: forward includes expiry, lists and the check of the scores; backward builds its lists again.
Rows `gather` are given the scores of keys; rows `gather_sampled` make random ones from the values in the timed call, by
`saccade.dynamic_mask_scores`, and backward reaches the values, the weight and A.
Peers: SDPA's cuDNN and FLASH backends and FlashAttention-4, dense and causal with their key heads grouped or expanded;
FlexAttention with the exact mask, its block mask timed apart, while it fits. For reference alone, at the same lengths: SDPA with
a dense mask, the paper's baseline, and the Triton kernel of the authors' last package with masks (flash-sparse-attn 1.2.4), where
it is installed; the making of their masks is not timed, and the difference of their outputs from ours is noted. Ours in turns with
these is `gather_beside_masks`. Calls of one shape take turns, three times or, if short, eleven times, in a new random order. `roof_ms` is that of the kept pairs at 790
TFLOP/s (bf16, measured as the peak of a large matrix product), not of memory. The note of a forward row has the peak memory of
forward alone, without gradient, and that of a backward row of both together, each with its inputs.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from peers import peers
from rows import Row, Writer, numbers_of
from tables.dynamic_mask_sampling import made
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade.hardware import has_package
from saccade.testing.timing import Timing, measure, measure_in_turns

PEAK_TFLOPS = 790.0
MASK_LENGTHS, MASK_KEEP = (4096, 8192), 1024
DEVICE = "cuda"
BACKEND = "gather"
SAMPLED, BESIDE_MASKS = "gather_sampled", "gather_beside_masks"
OF_MASKS = (BESIDE_MASKS, "sdpa_mask", "fsa", "flex")
NAMES = ("gather", SAMPLED, "sdpa_flash", "sdpa_cudnn", "fa4", *OF_MASKS)


@dataclass(frozen=True)
class Setting:
    """`scores`: random (the worst case for skipping), local (recent keys win) or heavy (a few tokens outrank the rest)."""

    length: int
    keep: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    scores: str = "random"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes that dense attention depends on."""
        return self.length, self.heads, self.kv_heads, self.dim

    def __str__(self) -> str:
        sizes = f"B=1 H={self.heads} Hkv={self.kv_heads} Tq={self.length} Tk={self.length} D={self.dim} keep={self.keep}"
        return f"dynamic_mask({sizes} {self.scores} bf16)"


LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SETTINGS = sorted(
    [Setting(n, w) for n in LENGTHS for w in (1024, 2048)]
    + [Setting(n, w, 16, 2, 64) for n in LENGTHS for w in (1024, 2048)]
    + [Setting(n, 1024, scores=kind) for n in (32768, 131072) for kind in ("local", "heavy")],
    key=lambda setting: (setting.length, setting.dim),
)


@dataclass(frozen=True)
class Contender:
    """A call to be timed. keep: keys of a query, None where it takes every pair of the causal triangle; note: of its rows."""

    name: str
    setting: Setting
    call: Callable[[], Tensor]
    leaves: list[Tensor]
    dout: Tensor
    keep: int | None
    note: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, str(self.setting), self.note)))


@dataclass(frozen=True)
class Case:
    """Settings that are timed in one go. masks: the implementations that take the exact mask, in the place of dense peers."""

    settings: tuple[Setting, ...]
    masks: bool

    def __str__(self) -> str:
        first = self.settings[0]
        return f"n={first.length} D={first.dim}{' masks' if self.masks else ''}"


def every_case() -> list[Case]:
    """The rows of the table. Masks are last: torch.compile leaves processes running that disturb calls of a tenth of a millisecond."""
    dense = [Case(tuple(group), False) for _, group in itertools.groupby(SETTINGS, key=lambda setting: setting.shape)]
    masked = [s for s in SETTINGS if s.length in MASK_LENGTHS and s.dim == 128 and s.keep == MASK_KEEP]
    return [*dense, *[Case((setting,), True) for setting in masked]]


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case."""
    size = numbers_of(row["problem"])
    return f"n={size['Tk']} D={size['D']}{' masks' if row['backend'] in OF_MASKS else ''}"


def run(writer: Writer, repeat_ms: int) -> None:
    """For each shape, measure the dense peers and every setting of ours in turns; then the others that take the exact mask."""
    for case in writer.part.cases(every_case()):
        if case.masks:
            _beside_masks(writer, case.settings[0], repeat_ms)
        else:
            _beside_dense(writer, case.settings, repeat_ms)
        gc.collect()
    for keep, dim in itertools.product((1024, 2048), (128, 64)):
        _exponent(writer, keep, dim)


def _beside_dense(writer: Writer, settings: tuple[Setting, ...], repeat_ms: int) -> None:
    sampled = [_sampled(setting) for setting in settings if setting.scores == "random"]
    ours = [own for own in (*map(_ours, settings), *sampled) if writer.part.has(own.name)]
    peers = [peer for peer in _peers(settings[0]) if writer.part.has(peer.name) and _runs(peer)]
    times = _compare(writer, [*ours, *peers], repeat_ms)
    dense = _better_form({str(peer): peer.name for peer in peers}, times)
    for own in ours:
        print(own.name, _line(own.setting, times[str(own)], dense), flush=True)


def _beside_masks(writer: Writer, setting: Setting, repeat_ms: int) -> None:
    contenders = [replace(_ours(setting), name=BESIDE_MASKS), *_dense_masks(setting)]
    if writer.part.has("flex"):
        contenders += _flex(writer, setting, repeat_ms)
    contenders = [contender for contender in contenders if writer.part.has(contender.name)]
    times = _compare(writer, contenders, repeat_ms)
    for name, found in times.items():
        print(f"{name}: fwd {found['fwd']:.3f} ms, bwd {found['bwd']:.3f} ms", flush=True)


def key_scores(setting: Setting) -> Tensor:
    """float32 `[1, Hkv, n]`."""
    shape = (1, setting.kv_heads, setting.length)
    noise = torch.randn(shape, device=DEVICE)
    if setting.scores == "local":
        return torch.arange(setting.length, device=DEVICE) * (8.0 / setting.length) + 1e-4 * noise
    if setting.scores == "heavy":
        return torch.where(torch.rand(shape, device=DEVICE) < 0.005, 10.0, 0.0) + 0.1 * noise
    return noise


def _leaves(setting: Setting, kv_heads: int | None = None) -> tuple[list[Tensor], Tensor]:
    heads = (setting.heads, kv_heads or setting.kv_heads, kv_heads or setting.kv_heads, setting.heads)
    made = [torch.randn(1, setting.length, h, setting.dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for h in heads]
    return [x.requires_grad_() for x in made[:3]], made[3]


def _ours(setting: Setting) -> Contender:
    qkv, dout = _leaves(setting)
    leaves = [*qkv, key_scores(setting).requires_grad_()]

    def call() -> Tensor:
        return saccade.dynamic_mask_attention(*leaves, keep=setting.keep, enable_gqa=True, backend=BACKEND)

    return Contender("gather", setting, call, leaves, dout, min(setting.keep, setting.length))


def _sampled(setting: Setting) -> Contender:
    query, key, value, weight, A = leaves = made(setting)

    def call() -> Tensor:
        scores = saccade.dynamic_mask_scores(value, weight, A)
        return saccade.dynamic_mask_attention(query, key, value, scores, keep=setting.keep, enable_gqa=True, backend=BACKEND)

    return Contender(SAMPLED, setting, call, leaves, torch.randn_like(query), min(setting.keep, setting.length))


def _peers(setting: Setting) -> list[Contender]:
    """The dense contenders, with their key heads grouped or expanded."""
    found = []
    long = setting.length > 16384
    for name, peer in peers().items():
        # in earlier runs several times slower than the others at every length
        if name == "sdpa_efficient" or (long and name == "sdpa_flash"):
            continue
        # cuDNN accepts expanded heads only at most sizes; its long rows take a second per call
        for expand in (False,) if name == "fa4" else (True,) if long else (False, True):
            qkv, dout = _leaves(setting, setting.heads if expand else None)
            options = {} if expand or name == "fa4" else {"enable_gqa": True}

            def call(peer=peer, qkv=qkv, options=options) -> Tensor:
                return peer(*qkv, is_causal=True, **options)

            found.append(Contender(name, setting, call, qkv, dout, None, "expanded heads" if expand else "grouped heads"))
    return found


def _runs(contender: Contender) -> bool:
    """Whether it runs, forward and backward; one that refuses is skipped and its reason is printed."""
    try:
        torch.autograd.grad(contender.call(), contender.leaves, contender.dout)
    except Exception as error:  # noqa: BLE001
        print(f"  {contender} does not run: {str(error).splitlines()[0][:90]}")
        return False
    return True


def _dense_masks(setting: Setting) -> list[Contender]:
    """SDPA with `[1, H, n, n]` scores, -inf where a key is not kept, and the authors' kernel with `[1, Hkv, n, n]` booleans."""
    scores = key_scores(setting)
    table = saccade.expiry(scores, setting.keep)
    at = torch.arange(setting.length, device=DEVICE)
    kept = (at <= at[:, None]) & (at[:, None] < table[:, :, None, :])
    qkv, dout = _leaves(setting, setting.heads)
    bias = torch.where(kept, scores[:, :, None, :], -math.inf).bfloat16()
    bias = bias.repeat_interleave(setting.heads // setting.kv_heads, dim=1)
    found = [Contender("sdpa_mask", setting, lambda: _sdpa_mask(*qkv, bias), qkv, dout, setting.keep, "expanded heads")]
    if has_package("flash_sparse_attn"):
        grouped, _ = _leaves(setting)
        added = scores[:, :, None, :].bfloat16()
        found.append(Contender("fsa", setting, lambda: _fsa(*grouped, kept, added), grouped, dout, setting.keep, "grouped heads"))
    return [_noted(contender, scores) for contender in found if _runs(contender)]


def _noted(contender: Contender, scores: Tensor) -> Contender:
    """The same, with the difference of its outputs from ours in its note."""
    leaves, keep = contender.leaves, contender.setting.keep
    ours = saccade.dynamic_mask_attention(*leaves, _spread(scores, leaves), keep=keep, enable_gqa=True)
    difference = (contender.call() - ours).abs().max().item()
    return replace(contender, note=f"{contender.note}, {difference:.1g} from ours")


def _spread(scores: Tensor, leaves: list[Tensor]) -> Tensor:
    return scores.repeat_interleave(leaves[1].shape[1] // scores.shape[1], dim=1)


def _sdpa_mask(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)


def _fsa(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, scores: Tensor) -> Tensor:
    from flash_sparse_attn import triton_sparse_attn_func

    rows = (x.transpose(1, 2) for x in (query, key, value))  # its layout is [B, T, H, D]
    return triton_sparse_attn_func(*rows, kept, scores, True).transpose(1, 2)


def _flex(writer: Writer, setting: Setting, repeat_ms: int) -> list[Contender]:
    """FlexAttention, if it runs; its block mask is timed and written here."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # backward runs again and again on one graph, which donated buffers forbid
    torch._functorch.config.donated_buffer = False
    qkv, dout = _leaves(setting)
    table = saccade.expiry(key_scores(setting), setting.keep)
    group = setting.heads // setting.kv_heads

    def kept(b, h, q, k):
        return (k <= q) & (q < table[b, h // group, k])

    make = torch.compile(create_block_mask)
    try:
        build = measure(lambda: make(kept, 1, setting.heads, setting.length, setting.length), repeat_ms=repeat_ms)
        mask, attend = make(kept, 1, setting.heads, setting.length, setting.length), torch.compile(flex_attention)
    except Exception as error:  # noqa: BLE001
        print(f"  flex makes no mask of {setting}: {str(error).splitlines()[0][:90]}")
        return []
    writer.add(Row("dynamic_mask_length", str(setting), "flex", "fwd", "bf16", *build, note="block mask"))
    found = Contender("flex", setting, lambda: attend(*qkv, block_mask=mask, enable_gqa=True), qkv, dout, setting.keep)
    return [found] if _runs(found) else []


def _compare(writer: Writer, contenders: list[Contender], repeat_ms: int) -> dict[str, dict[str, float]]:
    """Forward, backward and peak memory of each, written; milliseconds and GiB by contender and by direction."""
    if not contenders:
        return {}
    length = contenders[0].setting.length
    # short calls are dominated by host time, which changes between two speeds for seconds
    rounds = 11 if length <= 8192 else 3
    forward = measure_in_turns({str(c): _without_gradient(c.call) for c in contenders}, rounds, repeat_ms=repeat_ms)
    backward = measure_in_turns({str(c): _again_and_again(c) for c in contenders}, rounds, repeat_ms=repeat_ms)
    found = {}
    for contender in contenders:
        name, first, peak = str(contender), _forward_peak(contender), _peak(contender)
        for direction, timing, factor, most in (("fwd", forward[name], 1.0, first), ("bwd", backward[name], 2.5, peak)):
            _write(writer, contender, direction, timing, factor, f"peak {most:.3f} GiB")
        found[name] = {"fwd": forward[name].p50, "bwd": backward[name].p50, "peak": peak}
    return found


def _without_gradient(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return call()

    return run


def _again_and_again(contender: Contender) -> Callable[[], object]:
    out = contender.call()
    return lambda: torch.autograd.grad(out, contender.leaves, contender.dout, retain_graph=True)


def _peak(contender: Contender) -> float:
    """GiB of forward plus backward, with its inputs."""
    both = lambda: torch.autograd.grad(contender.call(), contender.leaves, contender.dout)  # noqa: E731
    return _peak_of(both, [*contender.leaves, contender.dout])


def _forward_peak(contender: Contender) -> float:
    """GiB of forward alone, without gradient, with its inputs."""
    return _peak_of(_without_gradient(contender.call), contender.leaves)


def _peak_of(call: Callable[[], object], inputs: list[Tensor]) -> float:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    held = sum(x.numel() * x.element_size() for x in inputs)
    return (torch.cuda.max_memory_allocated() - before + held) / 2**30


def _write(writer: Writer, contender: Contender, direction: str, timing: Timing, factor: float, more: str) -> None:
    setting, n, keep = contender.setting, contender.setting.length, contender.keep
    pairs = n * (n + 1) / 2 if keep is None else keep * (keep + 1) / 2 + (n - keep) * keep
    flops = factor * 4.0 * setting.heads * setting.dim * pairs
    note = ", ".join(filter(None, (contender.note, more)))
    writer.add(
        Row(
            "dynamic_mask_length", str(setting), contender.name, direction, "bf16", *timing, roof_ms=flops / PEAK_TFLOPS / 1e9,
            tflops=flops / timing.p50 / 1e9, note=note,
        )
    )  # fmt: skip


def _better_form(names: dict[str, str], times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The times of the faster form of a peer that ran with grouped and with expanded heads."""
    found: dict[str, dict[str, float]] = {}
    for form, name in names.items():
        mine = times[form]
        if name not in found or mine["fwd"] + mine["bwd"] < found[name]["fwd"] + found[name]["bwd"]:
            found[name] = mine
    return found


def _line(setting: Setting, ours: dict[str, float], rivals: dict[str, dict[str, float]]) -> str:
    """Print our times, the speed-up over the best dense peer, and its share of the ratio of pairs."""
    n, w = setting.length, min(setting.keep, setting.length)
    ratio = (n * (n + 1) / 2) / (w * (w + 1) / 2 + (n - w) * w)
    words = [f"n={n:6d} w={w} D={setting.dim} {setting.scores:6s}"]
    for direction in ("fwd", "bwd"):
        name = min(rivals, key=lambda r: rivals[r][direction]) if rivals else "-"
        best = rivals[name][direction] if rivals else math.nan
        gain = best / ours[direction]
        words.append(f"{direction} {ours[direction]:7.3f} ms x{gain:5.2f} of {name} {best:.3f} ({gain / ratio:.2f} of pairs)")
    least = min((t["peak"] for t in rivals.values()), default=math.nan)
    words.append(f"peak {ours['peak']:.2f} GiB (dense {least:.2f})")
    return "  ".join(words)


def _exponent(writer: Writer, keep: int, dim: int) -> None:
    """Slope of log time over log n from 16,384 on: 1 is linear."""
    for direction in ("fwd", "bwd"):
        points = [
            (math.log(int(r.problem.split("Tk=")[1].split()[0])), math.log(r.ms_p50))
            for r in writer.rows
            if r.backend == "gather" and r.direction == direction and f"D={dim} keep={keep} random" in r.problem
            and int(r.problem.split("Tk=")[1].split()[0]) >= 16384
        ]  # fmt: skip
        if len(points) > 1:
            mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
            slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
            print(f"w={keep} D={dim} {direction}: time ~ n^{slope:.2f}")
