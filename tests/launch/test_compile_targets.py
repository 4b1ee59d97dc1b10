"""Every Triton kernel, compiled for each architecture with no GPU: does it fit, spill, use the matrix units?

The compiler runs in one process for each architecture, without the interpreter that the other tests need.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

# what `compile_all` compiles: name -> (Tq, Tk, D, dtype, features, configuration or None for the library's choice)
PROBLEMS = {
    "plain": (64, 64, 64, "bfloat16", {}, None),
    "time first": (64, 64, 64, "bfloat16", {"outside": True}, None),  # the row stride is an argument, and no constant
    "odd": (49, 49, 24, "float16", {"lengths": True}, None),
    "bias": (49, 49, 32, "bfloat16", {"bias": True}, None),
    "mask-dropout": (64, 64, 64, "bfloat16", {"mask": True, "dropout": True, "dlse": True}, None),
    "float32": (64, 64, 32, "float32", {}, None),
    # 13 queries: with a tile of 16, under a mask, Triton adds up the same elements twice
    "narrow": (13, 21, 16, "float16", {"mask": True, "lengths": True, "dropout": True}, {"warps": 1}),
    "narrow-both": (5, 7, 16, "float16", {"mask": True, "dropout": True}, None),
    "heads": (32, 32, 32, "bfloat16", {"is_causal": True}, {"warps": 4, "heads": 4}),
    "q-blocks": (128, 128, 64, "bfloat16", {}, {"warps": 4, "q_blocks": 2}),
    "persistent": (64, 64, 64, "bfloat16", {}, {"warps": 4, "programs_per_sm": 2, "stages": 2}),
    "prefetch": (64, 64, 64, "bfloat16", {}, {"warps": 4, "prefetch": 2}),
    "chunked": (128, 128, 128, "bfloat16", {}, {"warps": 8, "chunk": 64, "stages": 2}),
    "chunked-features": (
        100,
        128,
        256,
        "bfloat16",
        {"mask": True, "lengths": True, "dropout": True},
        {"warps": 8, "chunk": 64, "stages": 2},
    ),
    "bias-windows": (49, 49, 32, "bfloat16", {"bias": True, "windows": True}, None),  # Swin, shifted
    # a bias gradient makes programs persistent: whole tiles held ahead once asked for 410 KB here
    "bias-streamed": (61, 61, 256, "bfloat16", {"bias": True}, {"warps": 4, "chunk": 64, "stages": 3}),
    "bias-streamed-128": (125, 125, 256, "bfloat16", {"bias": True}, {"warps": 8, "chunk": 64, "stages": 2}),
    "bias-whole-128": (125, 125, 64, "bfloat16", {"bias": True}, {"warps": 8, "q_blocks": 4, "stages": 3}),
    "tma": (128, 128, 64, "bfloat16", {}, {"warps": 8, "tma": True}),
    "tma-chunked": (128, 128, 128, "bfloat16", {}, {"warps": 8, "chunk": 64, "stages": 2, "tma": True}),
    # as `UNSPLIT` of the configuration has them
    "masked": (128, 128, 32, "bfloat16", {"mask": True}, {"warps": 8}),
    "bias-row": (128, 128, 32, "bfloat16", {"bias": True, "row": True}, {"warps": 8}),
    "pool": (1, 64, 64, "bfloat16", {}, None),
    "pool-features": (1, 100, 80, "float16", {"mask": True, "lengths": True, "dropout": True, "dlse": True}, None),
    "pool-bias": (1, 64, 64, "bfloat16", {"bias": True}, None),
    "pool-matrix": (1, 64, 64, "bfloat16", {}, {"warps": 2, "matrix": True}),
}
EVERYWHERE = {"plain", "bias", "chunked", "pool", "pool-bias"}  # every kernel; the other problems are compiled for sm_90 alone
# bytes of local memory a thread that the compiler may use. Plain problems with the library's own choice, and every row of the
# measured table, must not spill on the architecture they are tuned on (eight registers at most, where that was measured fastest); features and forced shapes may
# (most: 1,328 bytes, where a 128 x 128 sum of dbias stays on chip beside the scores).
STACK_LIMIT, TABLE_STACK_LIMIT = 1536, 32
NARROW = {"narrow", "narrow-both"}
NO_SPILLS = {"plain", "time first", "odd", "pool", "masked", "bias-row"}
# float32 is computed exactly, on the ordinary units; pooling has no matrix product
NO_MATRIX_UNITS = {"pool", "pool-features", "pool-bias", "float32"}


# with a file, only kernels of it or, where it defines none, of the files that use its functions
WANTED: list[Path] = []


def is_wanted(kernel) -> bool:
    """Whether a kernel is to be compiled."""
    if not WANTED:
        return True
    home, text = Path(kernel.fn.__code__.co_filename), WANTED[0].read_text(encoding="utf-8")
    if re.search(r"^def \w+_kernel\(", text, re.MULTILINE):
        return home == WANTED[0]
    module = ".".join(WANTED[0].with_suffix("").parts[WANTED[0].parts.index("saccade") :])
    return module in home.read_text(encoding="utf-8")


def sampled(cases: list, arch: int, always: set[int], every: int = 5) -> list:
    """The cases that `make test` compiles: those at the places `always`, with every kernel, and on sm_90 the last of each `every` cases. For a
    single kernel those at `always` are enough."""
    if os.environ.get("EVERY_CASE"):
        return cases
    return [
        case for place, case in enumerate(cases) if place in always or (arch == 90 and not WANTED and place % every == every - 1)
    ]


def compile_all(arch: int) -> list[dict]:
    """Compile forward and backward of every problem; runs in its own process."""
    import torch

    from saccade.exact.args import AttentionArgs
    from saccade.exact.short.config import LARGE, ROBUST, Config
    from saccade.exact.short.launch import Launch
    from saccade.exact.short.launchers import backward, forward
    from saccade.testing.inputs import time_first
    from tools.aot import SHARED_LIMIT, compile_launch, recording

    def meta(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows = []
    always = {place for place, name in enumerate(PROBLEMS) if name in EVERYWHERE | (NO_SPILLS | NARROW if arch == 90 else set())}
    problems = [(name, *p) for name, p in sampled(list(PROBLEMS.items()), arch, always) if arch == 90 or name in EVERYWHERE]
    if arch == 90:
        for table in (LARGE, ROBUST):
            for (direction, size, dim), row in sampled(
                list(table.items()), arch, set(), every=17
            ):  # prime to the rows of a direction
                q_len = 1 if direction.startswith("pool") else size
                problems.append((f"table {direction} {size} {dim}", q_len, size, dim, "bfloat16", {direction: True}, vars(row)))
    for name, q_len, kv_len, dim, dtype, features, config in problems:
        kind = getattr(torch, dtype)
        tensors = [meta(8, t, 4, dim, dtype=kind).transpose(1, 2) for t in (q_len, kv_len, kv_len, q_len)]
        query, key, value, dout = map(time_first, tensors) if "outside" in features else tensors
        args = AttentionArgs(
            query, key, value,
            meta(8, 1, 1, kv_len, dtype=torch.bool) if "mask" in features else None,
            meta(*_bias_shape(features, q_len, kv_len), dtype=kind) if "bias" in features else None,
            meta(8, dtype=torch.int32) if "lengths" in features else None,
            meta(1, dtype=torch.int64) if "dropout" in features else None,
            0.1 if "dropout" in features else 0.0, "is_causal" in features, dim**-0.5,
        )  # fmt: skip
        lse = meta(8, 4, q_len, dtype=torch.float32)
        chosen = None if config is None else Config(**config)
        with recording(Launch) as launches:
            if not features.keys() & {"bwd", "pool_bwd"}:
                forward(args, chosen)
            if not features.keys() & {"fwd", "pool_fwd"}:
                backward(
                    args,
                    dout,
                    lse if "dlse" in features else None,
                    None,
                    lse,
                    bias_grad="bias" in features and "row" not in features,
                    packed=None,
                    config=chosen,
                )
        for launch, tensors in launches:
            if not is_wanted(launch.kernel):
                continue
            r = compile_launch(launch, tensors, arch)
            rows.append({
                "problem": name, "kernel": r.kernel, "registers": r.registers, "stack": r.stack, "shared": r.shared,
                "narrow": r.narrow_products, "shared_limit": SHARED_LIMIT[arch], "matrix": -1 if name.startswith("table") else r.matrix_instructions,
            })  # fmt: skip
    return (
        rows + gather_rows(arch) + decode_rows(arch) + pruned_rows(arch) + ragged_rows(arch) + token_rows(arch) + offer_rows(arch)
        + shared_bias_rows(arch) + behind_rows(arch) + score_rows(arch)
    )  # fmt: skip


def _bias_shape(features: dict, q_len: int, kv_len: int) -> tuple[int, ...]:
    return (8, 1, 1, kv_len) if "row" in features else (2 if "windows" in features else 1, 4, q_len, kv_len)


class Recorder:
    """Stands for a Triton kernel; keeps what it is launched with."""

    def __init__(self, module, name):
        found = getattr(module, name)
        self.kernel, self.calls = found.kernel if isinstance(found, Recorder) else found, []
        self.params, self.__name__ = self.kernel.params, self.kernel.__name__
        setattr(module, name, self)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append((arguments, options))
            return {grid: lambda *again: None}

        return launch

    def rows(self, problem, arch):
        """Each launch, compiled."""
        from types import SimpleNamespace

        import torch

        from tools.aot import SHARED_LIMIT, compile_launch

        for arguments, options in self.calls if is_wanted(self.kernel) else ():
            tensors = tuple(x for x in arguments if isinstance(x, torch.Tensor))
            static = arguments[len(tensors) :]
            launch = SimpleNamespace(kernel=self.kernel, static=static, options=options, arguments=lambda given: given)
            r = compile_launch(launch, tensors, arch)
            yield {
                "problem": problem, "kernel": r.kernel, "registers": r.registers, "stack": r.stack, "shared": r.shared,
                "narrow": r.narrow_products, "shared_limit": SHARED_LIMIT[arch], "matrix": r.matrix_instructions,
            }  # fmt: skip


def gather_rows(arch: int) -> list[dict]:
    """The dynamic mask's kernels at Hq = 32, Hkv = 8, D = 64 and 128, as its launchers shape them."""
    import torch

    from saccade.dynamic_mask.gather import launchers
    from saccade.dynamic_mask.selection import expiry_triton, lists_triton
    from saccade.launch import delta

    launchers.arch_of = lambda device: arch  # shapes follow the shared memory of the device
    recorders = [
        Recorder(module, name)
        for module in (delta, expiry_triton, launchers, lists_triton)
        for name in list(vars(module))
        if name.endswith("_kernel")
    ]
    scores = torch.zeros(1, 8, 5000)
    stop = expiry_triton.causal_expiry(scores, 64, torch.tensor([5000]))
    for dim in sampled([128, 64], arch, {0}):
        query, key = (torch.empty(1, 5000, h, dim, dtype=torch.bfloat16).transpose(1, 2) for h in (32, 8))
        call = (query, key, key, scores, torch.zeros_like(stop), stop, 64, 0.1)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            out, lse = launchers.forward(*call)
            launchers.backward(query, lse, out, lse, *call)
    torch.use_deterministic_algorithms(False)
    rows = [row for recorder in recorders for row in recorder.rows("gather", arch)]
    return [row if row["kernel"].startswith("_gather") else {**row, "problem": "selection"} for row in rows]


# B, Hq, Hkv, D, keep, dtype, tokens at once with padding, sinks and window
DECODED = [
    (1, 32, 8, 128, 1024, "bfloat16", 1, False, 0, 0), (1, 32, 8, 128, 2048, "bfloat16", 1, False, 0, 0),
    (64, 32, 8, 128, 1024, "float16", 4, True, 0, 0), (1, 8, 1, 256, 1000, "bfloat16", 1, False, 0, 0),
    (2, 3, 3, 20, 7, "float16", 1, True, 0, 0), (1, 32, 8, 128, 1024, "bfloat16", 1, False, 4, 128),
    (2, 8, 1, 256, 1000, "float16", 1, True, 1, 0),
]  # fmt: skip


def decode_rows(arch: int) -> list[dict]:
    """The decode kernel on 132 multiprocessors; the first launch of a call, the others being the same kernel."""
    import torch

    from saccade.dynamic_mask.args import Places
    from saccade.dynamic_mask.decode import launcher as decode_launcher

    decode_launcher.multiprocessors = lambda device: 132
    recorder = Recorder(decode_launcher, "_decode_kernel")
    for batch, heads, kv_heads, dim, keep, dtype, count, padded, sinks, window in sampled(DECODED, arch, {0, 6}):
        make = functools.partial(torch.empty, dtype=getattr(torch, dtype), device="meta")
        narrow = functools.partial(torch.empty, device="meta")
        shape = (batch, kv_heads, keep + sinks + window)
        entries = (*shape, dim)
        places = Places(
            make(entries), make(entries), narrow(shape), narrow(shape, dtype=torch.int32), narrow(shape[:2], dtype=torch.int64)
        )
        new = [make(batch, count, h, dim).transpose(1, 2) for h in (heads, kv_heads, kv_heads)] + [narrow(batch, kv_heads, count)]
        lengths = narrow(batch, dtype=torch.int32) if padded else None
        decode = decode_launcher.Decode(*new, lengths, places, 0.1, True, padded, sinks, window)
        decode.q_len = 1
        decode(*new, lengths, places)
    return list(recorder.rows("decode", arch))


# D, dtype, pattern, features; a plain problem has the name "pruned", which must not spill on sm_80 and sm_90
PRUNED = [
    (64, "bfloat16", (2, 4), ()), (64, "float16", (1, 2), ("is_causal",)), (128, "bfloat16", (2, 4), ("is_causal",)),
    (256, "bfloat16", (2, 4), ()), (80, "float16", (4, 8), ()), (64, "float32", (1, 2), ()), (128, "float32", (2, 4), ()),
    (128, "bfloat16", (2, 4), ("mask", "bias", "blocks", "dropout")), (64, "bfloat16", (3, 5), ("dropout", "blocks")),
    (64, "bfloat16", (2, 4), ("is_causal", "dense")),
]  # fmt: skip


def pruned_rows(arch: int) -> list[dict]:
    """The masking kernels of N:M attention, forward and backward with grouped heads."""
    import torch

    from saccade.launch import delta
    from saccade.nm_sparse.args import NMSparseArgs
    from saccade.nm_sparse.bits import words_of
    from saccade.nm_sparse.masked import launchers

    recorders = [Recorder(m, name) for m in (delta, launchers) for name in list(vars(m)) if name.endswith("_kernel")]
    rows = []
    for dim, dtype, (keep, group), features in sampled(PRUNED, arch, {0, 7}):
        make = functools.partial(torch.empty, device="meta")
        query, key, value, dout = (make(2, 300, h, dim, dtype=getattr(torch, dtype)).transpose(1, 2) for h in (4, 2, 2, 4))
        mask = make(2, 1, 300, 300, dtype=torch.bool) if "mask" in features else None
        bias = make(1, 4, 300, 300) if "bias" in features else None
        blocks = make(1, 4, 5, 5, dtype=torch.bool) if "blocks" in features else None
        seed = make(1, dtype=torch.int64) if "dropout" in features else None
        dropout_p = 0.1 if "dropout" in features else 0.0
        dense = (4, 64) if "dense" in features else (0, 0)
        args = NMSparseArgs(
            query, key, value, mask, bias, blocks, seed, keep, group, dropout_p, "is_causal" in features, 0.1, *dense
        )
        out, lse, _ = launchers.forward(args, True)
        kept = make(2, 4, 300, words_of(300, group), dtype=torch.int32)
        launchers.backward(args, dout, lse, out, lse, kept, bias_grad=bias is not None)
        plain = set(features) <= {"is_causal"} and "pruned"
        name = f"{plain or 'pruned-features'}{'-float32' if dtype == 'float32' else ''}"
        for recorder in recorders:
            rows += recorder.rows(name, arch)
            recorder.calls.clear()
    return rows


# longest sequence, D, dtype, features: every bucket and the long form, then what takes registers; of dense rows the long form
RAGGED = [
    (200, 64, "bfloat16", ()), (64, 32, "float16", ("bias", "dropout")), (33, 64, "float32", ()), (128, 32, "bfloat16", ()),
    (200, 64, "bfloat16", ("dense", "mask", "bias", "dropout")),
]  # fmt: skip


SELECTION = ("count_kernel", "place_kernel", "delta_kernel", "clear_kernel", "in_order_kernel", "longest_first_kernel")


def ragged_rows(arch: int) -> list[dict]:
    """The Triton kernels of packed sequences, forward and backward."""
    import torch

    from saccade.exact.ragged import call, launchers, launches, plan, window_parts
    from saccade.exact.varlen.args import VarlenArgs

    call.arch_of, call.multiprocessors = lambda device: arch, lambda device: 132
    call.every_sequence = lambda ends, sequences: (ends, ends)  # its lists lie on a device
    modules = (plan, launches, window_parts)
    recorders = [Recorder(module, name) for module in modules for name in list(vars(module)) if name.endswith("_kernel")]
    rows = []
    many = torch.empty(
        plan.MOST_AT_ONCE + 2, dtype=torch.int32, device="meta"
    )  # more sequences than the kernel of lists counts itself
    plan.make_plan(many, many)
    for listed in (window_parts.in_order, window_parts.longest_first):
        listed(window_parts.Offsets(torch.empty(2000, dtype=torch.int32, device="meta"), 5000, 0), 128)
    for longest, dim, dtype, features in sampled(RAGGED, arch, {1, 4}):
        make = functools.partial(torch.empty, device="meta")
        dense = "dense" in features
        shape = (20, 4, longest, dim) if dense else (5000, 4, dim)
        query, key, value, dout = (make(shape, dtype=getattr(torch, dtype)) for _ in range(4))
        ends = make(20 if dense else 2000, dtype=torch.int32)
        bias = make((1, 4, longest, longest) if dense else (4, longest, longest)) if "bias" in features else None
        mask = make(20, 1, longest, longest, dtype=torch.bool).expand(-1, 4, -1, -1) if "mask" in features else None
        seed = make(1, dtype=torch.int64) if "dropout" in features else None
        numbers = (longest, longest, 0.1 if "dropout" in features else 0.0, 2 if "dropout" in features else 0, 0.1)
        args = VarlenArgs(query, key, value, ends, ends, bias, seed, *numbers, mask=mask)
        out, lse = launchers.forward(args)
        launchers.backward(args, dout, lse if "bias" in features else None, out, lse, bias_grad=bias is not None)
        if not dense:
            launches.clearing(call.RaggedCall(args), query, key, value).run(call.RaggedCall(args))
        name = "ragged-float32" if dtype == "float32" else "ragged-features" if features else "ragged"
        for recorder in recorders:
            selection = recorder.__name__ in SELECTION
            rows += [{**row, "problem": "selection"} if selection else row for row in recorder.rows(name, arch)]
            recorder.calls.clear()
    return rows


# D, dtype, features, of token tiles: each dtype with and without dropout and a causal mask; the second holds most. Float32 takes D = 32 alone here,
# and more than 64 comes with a window
TOKENS = [
    (64, "bfloat16", ()), (64, "bfloat16", ("causal", "dropout", "dlse", "grouped")), (32, "float16", ()), (32, "float32", ()),
    (64, "float16", ("causal",)), (32, "bfloat16", ("dropout",)), (32, "float32", ("causal", "dropout")), (64, "float16", ("dropout", "dlse")),
    (32, "float32", ("dropout", "dlse")), (32, "float16", ("causal", "dropout")), (64, "bfloat16", ("causal",)), (32, "bfloat16", ("causal",)),
    (48, "float16", ("dropout",)), (32, "float32", ("causal",)), (64, "bfloat16", ("window",)), (128, "bfloat16", ("window", "grouped")),
    (256, "bfloat16", ("window", "grouped")), (128, "float16", ("window", "dropout", "dlse")), (256, "float32", ("window",)),
    (64, "float16", ("window", "causal", "dropout", "dlse", "grouped")),
]  # fmt: skip


def token_rows(arch: int) -> list[dict]:
    """The kernels of packed tokens, forward and backward, as their launches shape them; but eager, with no capture to find bounds for."""
    import torch

    from saccade.exact.ragged import call, token_launches
    from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, VarlenArgs

    call.arch_of = lambda device: arch
    token_launches.capture_id = lambda device: 1  # nothing reads the numbers of a tensor during a capture
    recorders = [Recorder(token_launches, name) for name in list(vars(token_launches)) if name.endswith("_kernel")]
    rows = []
    for dim, dtype, features in sampled(TOKENS, arch, {1, 16} | ({0} if arch == 90 else set()), every=21):
        make = functools.partial(torch.empty, device="meta")
        query, key, value, out, dout = (
            make(5000, 2 if "grouped" in features and place in (1, 2) else 4, dim, dtype=getattr(torch, dtype))
            for place in range(5)
        )
        ends, seed = make(2000, dtype=torch.int32), make(1, dtype=torch.int64) if "dropout" in features else None
        dropout_p, causal = 0.1 if seed is not None else 0.0, BOTTOM_RIGHT if "causal" in features else FULL
        window = (64, 64) if "window" in features else ()
        packed = call.RaggedCall(VarlenArgs(query, key, value, ends, ends, None, seed, 200, 200, dropout_p, causal, 0.1, *window))
        lse = make(4, 5000)
        token_launches.forward(packed, out, lse)
        gradients = tuple(map(torch.empty_like, (query, key, value)))
        token_launches.backward(packed, dout, lse if "dlse" in features else None, out, lse, gradients)
        name = (
            "tokens-float32" if dtype == "float32" else "tokens-features" if {"dropout", "window"} & set(features) else "tokens"
        )
        for recorder in recorders:
            rows += [
                {**row, "problem": "selection" if recorder.__name__ in ("bounds_kernel", "survivors_kernel") else name}
                for row in recorder.rows(name, arch)
            ]
            recorder.calls.clear()
    return rows


# Tq = Tk, D, dtype, shape of the bias, features
SHARED_BIAS = [
    (384, 32, "bfloat16", (1, 4), ()), (384, 32, "bfloat16", (1, 4), ("mask",)), (300, 64, "float16", (2, 1), ("lengths", "dlse", "dropout")),
    (256, 128, "bfloat16", (20, 4), ("grouped",)), (256, 64, "bfloat16", (1, 4), ("turned",)), (130, 32, "float32", (1, 4), ("mask",)),
]  # fmt: skip


def shared_bias_rows(arch: int) -> list[dict]:
    """The kernels of a bias that rows share, forward and backward."""
    import torch

    from saccade.exact.args import AttentionArgs
    from saccade.exact.shared_bias import call, launchers, launches
    from saccade.exact.shared_bias.config import config_of

    call.arch_of, call.multiprocessors = lambda device: arch, lambda device: 132
    recorders = [Recorder(launches, name) for name in list(vars(launches)) if name.endswith("_kernel")]
    rows = []
    for tokens, dim, dtype, shared, features in sampled(SHARED_BIAS, arch, {0}):
        make = functools.partial(torch.empty, device="meta")
        query, key, value, out, dout = (
            make(20, tokens, 2 if "grouped" in features and place in (1, 2) else 4, dim, dtype=getattr(torch, dtype)).transpose(
                1, 2
            )
            for place in range(5)
        )
        lse = make(20, 4, tokens)
        args = AttentionArgs(
            query, key, value, make(20, 1, 1, tokens, dtype=torch.bool) if "mask" in features else None,
            make(*shared, tokens, tokens, dtype=getattr(torch, dtype)), make(20, dtype=torch.int32) if "lengths" in features else None,
            make(1, dtype=torch.int64) if "dropout" in features else None, 0.1 if "dropout" in features else 0.0, False, dim**-0.5,
        )  # fmt: skip
        config = replace(config_of(dim, query.element_size(), arch), turns="turned" in features)
        launchers.forward(args, config)
        launchers.backward(args, dout, lse if "dlse" in features else None, out, lse, bias_grad=True, packed=None, config=config)
        name = "shared bias-float32" if dtype == "float32" else "shared bias features" if features else "shared bias"
        for recorder in recorders:
            rows += list(recorder.rows(name, arch))
            recorder.calls.clear()
    return rows


def offer_rows(arch: int) -> list[dict]:
    """The kernels of keys that ranks offer each other."""
    import torch

    from saccade.dynamic_mask.selection import offers_triton

    recorders = [Recorder(offers_triton, name) for name in ("rank_kernel", "copy_kernel")]
    make = functools.partial(torch.empty, device="meta")
    rows, scores, places = make(2, 1, 4, 512, 128, dtype=torch.bfloat16), make(2, 1, 4, 512), make(1, 4, 512, dtype=torch.int64)
    offers_triton.rank(scores, places.view(-1)[:1])
    offers_triton.copy((rows, rows, scores), places, (rows[0], rows[0], scores[0]))
    return [row for recorder in recorders for row in recorder.rows("selection", arch)]


def behind_rows(arch: int) -> list[dict]:
    """The kernel that clears what lies behind the last sequence."""
    import torch

    from saccade.exact.varlen import zeros
    from saccade.exact.varlen.behind import zero_behind

    recorder = Recorder(zeros, "zero_behind_kernel")
    zero_behind(torch.empty(300, 12, 128, device="meta", dtype=torch.bfloat16), torch.empty(5, device="meta", dtype=torch.int32))
    return list(recorder.rows("selection", arch))


# shape of the values `[B, S, E]` or `[B, Hkv, S, D]`, key heads, dtype, whether there is a bias
SCORES = [
    ((1, 16384, 1024), 8, "bfloat16", False), ((2, 5, 128), 2, "float16", True), ((1, 16384, 1024), 8, "float32", False),
    ((1, 8, 16384, 128), 8, "float16", False), ((2, 300, 144), 3, "bfloat16", True), ((1, 2, 300, 48), 2, "float32", True),
]  # fmt: skip


def score_rows(arch: int) -> list[dict]:
    """The kernels of the scores of keys from their values, forward and backward."""
    import torch

    from saccade.dynamic_mask.scores import launchers

    recorders = [Recorder(launchers, name) for name in ("scores_kernel", "scores_gradient_kernel")]
    make, rows = functools.partial(torch.empty, device="meta"), []
    for shape, heads, dtype, has_bias in sampled(SCORES, arch, {0, 1, 2}):
        values = make(shape, dtype=getattr(torch, dtype))
        weight = make(heads, shape[2] if len(shape) == 3 else shape[1] * shape[3], dtype=values.dtype)
        slopes, bias = make(heads), make(heads) if has_bias else None
        launchers.backward(*launchers.forward(values, weight, slopes, bias, "exp", True), values, weight)
        name = "scores-float32" if dtype == "float32" else "scores"
        for recorder in recorders:
            rows += list(recorder.rows(name, arch))
            recorder.calls.clear()
    return rows


NEWEST = Path(sys.prefix) / "triton-newest"  # the release that the newest torch brings; scripts/setup.sh puts it there
# bytes of local memory that the newest Triton spills where the one of this environment spills none: (architecture, problem) -> bytes. Not timed
NEWEST_STACK = {(90, "table bwd 32 256"): 424, (90, "table pool_bwd 64 256"): 48}


@pytest.fixture(
    scope="module",
    # one to two minutes each on one core: each release of Triton and the least and the most shared memory always, the others before a release
    params=[("installed", 90), ("newest", 120)]
    + [("installed", 80), ("installed", 100), ("newest", 90)] * bool(os.environ.get("EVERY_CASE")),
    ids=lambda asked: f"{asked[0]}-sm_{asked[1]}",
)
def compiled(request, tmp_path_factory):
    release, arch = request.param
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # compile here, whatever an earlier run left
    if release == "newest" and not NEWEST.is_dir():
        pytest.skip(f"there is no {NEWEST}; `make setup` installs it")
    root = str(Path(__file__).parent.parent.parent)  # for tools
    places = ([str(NEWEST)] if release == "newest" else []) + [root, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run([sys.executable, __file__, str(arch)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return release, arch, json.loads(done.stdout.splitlines()[-1])


def failures_of(release: str, arch: int, rows: list[dict]) -> list[str]:
    """The faults of compiled kernels, a sentence each."""
    failures = []
    for row in rows:
        name = row["problem"]
        if row["shared"] > row["shared_limit"]:
            failures.append(f"too much shared memory: {row}")
        none = name == "decode" or (name == "pruned" and arch < 100) or (name in NO_SPILLS and arch == 90)
        limit = TABLE_STACK_LIMIT if name.startswith("table") or name == "tokens" else 0 if none else STACK_LIMIT
        if release == "newest":
            limit = max(limit, NEWEST_STACK.get((arch, name), 0))
        if row["stack"] > limit:
            failures.append(f"spills: {row}")
        if row["narrow"]:
            failures.append(f"lanes repeat one another: {row}")
        if row["kernel"] == "_delta_kernel" and name.startswith("pruned"):
            continue
        ordinary = name.endswith("-float32") or name in NO_MATRIX_UNITS or "pool_bwd" in name or name == "selection"
        if not name.startswith("table") and (row["matrix"] == 0) != ordinary:
            failures.append(f"matrix instructions: {row}")
    return failures


@pytest.mark.slow
def test_kernels_fit_their_architecture(compiled):
    release, arch, rows = compiled
    kernels = {
        "_fwd_kernel", "_bwd_kernel", "_fwd_chunked_kernel", "_bwd_chunked_kernel", "_pool_fwd_kernel", "_pool_bwd_kernel",
        "_gather_fwd_kernel", "_gather_dq_kernel", "_gather_dkv_kernel", "_decode_kernel", "_delta_kernel",
        "_masked_fwd_kernel", "_masked_dq_kernel", "_masked_dkv_kernel", "_masked_dbias_kernel",
        "count_kernel", "place_kernel", "forward_tile_kernel", "forward_long_kernel", "backward_tile_kernel", "delta_kernel",
        "backward_keys_kernel", "backward_queries_kernel", "clear_kernel", "weights_kernel", "backward_bias_kernel", "bounds_kernel", "survivors_kernel", "forward_tokens_kernel",
        "backward_tokens_kernel", "rank_kernel", "copy_kernel", "zero_behind_kernel", "scores_kernel", "scores_gradient_kernel", "forward_kernel", "rows_kernel", "keys_kernel", "queries_kernel", "bias_kernel",
        "in_order_kernel", "longest_first_kernel", "_best_of_chunk_kernel", "_scan_kernel", "_admit_kernel", "_expire_kernel", "_candidates_kernel", "_lists_kernel",
    }  # fmt: skip
    assert {r["kernel"] for r in rows} == kernels
    failures = failures_of(release, arch, rows)
    assert not failures, "\n".join(failures)


if __name__ == "__main__":
    WANTED += [Path(name).resolve() for name in sys.argv[2:]]
    found = compile_all(int(sys.argv[1]))
    print(json.dumps({"rows": found, "failures": failures_of("installed", int(sys.argv[1]), found)} if WANTED else found))
