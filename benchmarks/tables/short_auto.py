"""The speed that a program gets: eager `saccade.attention` with `auto` and by name, against torch's function called directly
(SDPA not forced).

Dtypes, features, odd sizes and few problems, off the paper's grid, and the masks that transformers builds. Calls follow each
other and take turns (wall clock, host time included). Rows where `auto` or `short` is slower than torch are printed, and `prefers` of the backend must follow the table.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from rows import Row, Writer
from steps import step

import saccade
from saccade.engine.problem import Problem
from saccade.exact.problem import describe_attention
from saccade.exact.short.backend import SHORT
from saccade.testing.timing import throughput_in_turns


@dataclass(frozen=True)
class Case:
    """One comparison; `feature` names what is added to plain attention, of a mask its form too: `_added_to_scores`."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    feature: str = ""

    @property
    def note(self) -> str:
        """The feature that the description of a call does not show: a mask of one row for all queries is `[B, 1, Tq, Tk]` as any other."""
        return self.feature if self.feature in SAME_ROWS else ""

    def __str__(self) -> str:
        return case_of({"problem": str(described(self, True)), "note": self.note})


NAMES = ("auto", "short", "sdpa")
SAME_ROWS = ("equal rows, expanded", "equal rows, copied")
# a mask or a bias of each form that transformers builds, and a bias that differs within the batch
FORMS = ("2-D mask", *SAME_ROWS, "added mask", "batch bias")
FEATURES = ("dropout", "causal", "lengths", "mask", "full mask", "bias", "grouped")
PLAIN = [(32, 64), (64, 32), (64, 64), (100, 80), (128, 32), (128, 64), (128, 128), (128, 256)]
CASES = (
    [Case(1024, 8, s, s, d, torch.float16) for s, d in PLAIN]
    + [Case(1024, 8, s, s, d, feature=f) for f in ("mask", "bias", "dropout", "causal", "lengths") for s, d in ((49, 32), (128, 64), (128, 128))]
    + [Case(1024, 8, s, s, 64, feature=f) for f in ("grouped", "dropout", "full mask") for s in (32, 64, 128)]
    + [Case(1024, 8, 128, 128, d, feature="causal") for d in (32, 256)]
    + [Case(b, 8, s, s, 64) for b in (1, 16, 128) for s in (17, 64, 128)]
    + [Case(1024, 8, 1, s, 64, dtype, f) for s in (50, 128) for dtype, f in ((torch.float32, ""), (torch.bfloat16, "mask"), (torch.bfloat16, "grouped"))]
    + [Case(n // 12, 12, s, s, d) for s, d in ((32, 64), (64, 64), (77, 64), (128, 64), (128, 32)) for n in (96, 768, 3072, 12288)]
    + [Case(b, 12, 128, 128, 32, feature="mask") for b in (32, 256, 1024)]
    + [Case(b, 8, s, s, 64, feature=f) for f in FORMS for b in (32, 1024) for s in (64, 128)]
    + [Case(b, 8, s, s, 64, feature=f) for f in FEATURES for b, s in ((32, 64), (32, 128), (64, 128))]
    + [Case(1024, 8, s, s, d, feature=f) for f in ("bias", "batch bias", "added mask") for s, d in ((32, 64), (128, 32))]
    + [Case(1024, 8, 64, 64, 64, feature="bias"), Case(1024, 8, 49, 49, 32, feature="batch bias")]
    # float32 last: its kernels take the compiler several seconds each
    + [Case(1024, 8, 32, 128, 64), Case(1024, 8, 128, 32, 64), Case(1024, 8, 7, 100, 64), Case(64, 64, 32, 32, 16)]
    + [Case(1024, 8, s, s, d, torch.float32) for s, d in ((32, 64), (64, 64))]
)  # fmt: skip


def every_case() -> list[Case]:
    """The rows of the table."""
    return CASES


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: its problem on any GPU, and its note."""
    return f"{re.sub(r' sm_[0-9]+', '', row['problem'])} {row['note']}".rstrip()


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, and forward plus backward."""
    for case in writer.part.cases(every_case()):
        qkv, ours, theirs, extra = _calls(case)
        problem = _described(case, qkv, ours)
        leaves = [*qkv, *extra]
        dout = torch.randn_like(qkv[0])
        calls = {"auto": functools.partial(ours, backend="auto"), "short": ours, "sdpa": theirs}
        for direction in ("fwd", "fwd+bwd"):
            timed = {name: step(call, direction, leaves, dout) for name, call in writer.part.calls(calls).items()}
            timings = throughput_in_turns(timed, "cuda", rounds=5, window_ms=repeat_ms / 4)
            dtype = str(case.dtype)[6:].replace("float", "fp").replace("bfp", "bf")
            for name, timing in timings.items():
                writer.add(Row("short_auto", str(problem), name, direction, dtype, *timing, note=case.note))
            if writer.part.backends:
                continue
            auto, named = (timings["sdpa"].p50 / timings[name].p50 for name in ("auto", "short"))
            taken = SHORT.prefers(replace(problem, needs_grad=direction != "fwd"))
            if auto < 0.97 or (named > 1.05 and not taken):
                print(
                    f"auto x{auto:.2f}, short x{named:.2f} {'taken' if taken else ''} {direction} {problem} {case.feature}",
                    flush=True,
                )


def described(case: Case, needs_grad: bool) -> Problem:
    """The problem of a case on an sm_90 device, made without one, as it is described where C++ repeats calls."""
    qkv, ours, _, _ = _calls(case, "meta")
    return replace(_described(case, qkv, ours), device_type="cuda", arch=90, needs_grad=needs_grad, host_counts=False)


def _described(case: Case, qkv, ours) -> Problem:
    options = ours.keywords
    return describe_attention(
        *qkv, options.get("attn_mask"), options.get("dropout_p", 0.0), case.feature == "causal", None,
        case.feature == "grouped", options.get("lengths"), False, False, True,
    )  # fmt: skip


def _calls(case: Case, device: str = "cuda"):
    def make(length: int, heads: int):
        x = torch.randn(case.batch, length, heads, case.dim, device=device, dtype=case.dtype)
        return x.transpose(1, 2).requires_grad_()

    kv_heads = case.heads // 4 if case.feature == "grouped" else case.heads
    qkv = (make(case.q_len, case.heads), make(case.kv_len, kv_heads), make(case.kv_len, kv_heads))
    ours, theirs, extra = {}, {}, []
    added = _added_to_scores(case, device)
    if added is not None:
        ours["attn_mask"] = theirs["attn_mask"] = added
        extra = [added] if added.requires_grad else []
    elif case.feature == "dropout":
        ours["dropout_p"] = theirs["dropout_p"] = 0.1
    elif case.feature == "causal":
        ours["is_causal"] = theirs["is_causal"] = True
    elif case.feature == "grouped":
        ours["enable_gqa"] = theirs["enable_gqa"] = True
    elif case.feature == "lengths":
        lengths = torch.randint(1, case.kv_len + 1, (case.batch,), device=device)
        ours["lengths"] = lengths
        theirs["attn_mask"] = (torch.arange(case.kv_len, device=device) < lengths[:, None])[:, None, None, :]
    return (
        qkv,
        functools.partial(saccade.attention, *qkv, backend="short", **ours),
        functools.partial(F.scaled_dot_product_attention, *qkv, **theirs),
        extra,
    )


def _added_to_scores(case: Case, device: str) -> torch.Tensor | None:
    """The mask or the bias of a case."""
    batch, lengths = case.batch, (case.q_len, case.kv_len)
    if case.feature in ("bias", "batch bias"):
        shape = (batch if case.feature == "batch bias" else 1, case.heads, *lengths)
        return torch.randn(shape, device=device, dtype=case.dtype, requires_grad=True)
    if case.feature == "2-D mask":
        return torch.rand(lengths, device=device) > 0.2
    if case.feature == "full mask":
        return torch.rand(batch, 1, *lengths, device=device) > 0.2
    if case.feature not in ("mask", "added mask", *SAME_ROWS):
        return None
    row = torch.rand(batch, 1, 1, case.kv_len, device=device) > 0.2
    if case.feature == "added mask":
        return torch.zeros_like(row, dtype=case.dtype).masked_fill(~row, torch.finfo(case.dtype).min)
    if case.feature in SAME_ROWS:
        row = row.expand(batch, 1, *lengths)
    return row.contiguous() if case.feature == "equal rows, copied" else row
