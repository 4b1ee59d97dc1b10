"""Sixteen threads that call every operation at once get what one thread gets, bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import saccade
from saccade.engine import lengths, prepare

THREADS, ROUNDS = 16, 6


def _leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def _tensors(n: int, *shape: int, count: int = 3):
    source = torch.Generator().manual_seed(n)
    return [torch.randn(*shape, generator=source) for _ in range(count)]


def attention(n, backend):
    query, key, value = _leaves(*_tensors(n, 2, 4, 5 + n % 7, 8))
    out, lse = saccade.attention(query, key, value, is_causal=n % 2 == 0, return_lse=True, backend=backend)
    return [out, lse, *torch.autograd.grad((out, lse), (query, key, value), (out.detach(), lse.detach()))]


def padded(n, backend):
    query, key, value = _leaves(*_tensors(n, 3, 2, 9, 8))
    out = saccade.attention(query, key, value, lengths=torch.tensor([n % 10, 9, 1]), backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (query, key, value))]


def packed(n, backend):
    (qkv,) = _leaves(*_tensors(n, 2, 6 + n % 5, 3, 2, 8, count=1))
    out = saccade.attention_qkvpacked(qkv, backend=backend)
    return [out, *torch.autograd.grad(out.sum(), qkv)]


def varlen(n, backend):
    query, key, value = _leaves(*_tensors(n, 20, 2, 8))
    ends = torch.tensor([0, n % 20, 20], dtype=torch.int32)
    out = saccade.attention_varlen(query, key, value, ends, ends, 20, 20, is_causal=n % 2 == 0, backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (query, key, value))]


def dynamic_mask(n, backend):
    query, key, value = _leaves(*_tensors(n, 1, 2, 40 + n % 3, 8))
    (scores,) = _leaves(*_tensors(n, 1, 2, 40 + n % 3, count=1))
    out = saccade.dynamic_mask_attention(query, key, value, scores, keep=1 + n % 9, sinks=n % 3, backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (query, key, value, scores))]


def scores(n, backend):
    values, (weight, A) = _leaves(*_tensors(n, 1, 2, 40 + n % 3, 8))[0], _leaves(torch.ones(2, 16), torch.ones(2))
    out = saccade.dynamic_mask_scores(values, weight, A, form=("exp", "linear")[n % 2], backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (values, weight, A))]


def expiry(n, backend):
    return [saccade.expiry(_tensors(n, 2, 3, 50 + n % 4, count=1)[0], 1 + n % 9, window=n % 4)]


def nm_sparse(n, backend):
    query, key, value = _leaves(*_tensors(n, 2, 2, 12 + n % 6, 8))
    out = saccade.nm_sparse_attention(query, key, value, pattern=("2:4", "1:2")[n % 2], backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (query, key, value))]


CALLS = [
    *((call, backend) for call in (attention, padded, packed, varlen) for backend in ("auto", "reference")),
    (packed, "sdpa"), (varlen, "sdpa"), (dynamic_mask, "auto"), (dynamic_mask, "gather_torch"), (dynamic_mask, "reference"), (expiry, "auto"),
    (scores, "auto"), (scores, "reference"),
    (nm_sparse, "auto"), (nm_sparse, "reference"),
]  # fmt: skip


def _jobs():
    return [(call, backend, n) for n in range(ROUNDS) for call, backend in CALLS]


def _bits(job):
    call, backend, n = job
    return [x.detach().contiguous().view(torch.int32) for x in call(n, backend)]


def agree() -> None:
    """Run the jobs in one thread, then in all, beside a memory of prepared calls that is emptied again and again."""
    torch.set_num_threads(1)
    prepare._MAX_PREPARED = 5
    jobs = _jobs()
    serial = [_bits(job) for job in jobs]
    together = threading.Barrier(THREADS)

    def work(number):
        together.wait()
        # each thread begins at another job, so that all operations run beside each other
        order = [(i + number * len(jobs) // THREADS) % len(jobs) for i in range(len(jobs))]
        return {i: _bits(jobs[i]) for i in order}

    with ThreadPoolExecutor(THREADS) as pool:
        for found in list(pool.map(work, range(THREADS))):
            for i, expected in enumerate(serial):
                for x, y in zip(found[i], expected, strict=True):
                    assert torch.equal(x, y), jobs[i]
    print(f"{len(jobs)} jobs agree")


def test_threads_agree_with_one_another_bit_for_bit():
    """In a process of its own: Triton's interpreter patches its modules while it runs, which no second thread survives."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(_jobs())} jobs agree\n"


@pytest.mark.unpoisoned
def test_threads_draw_dropout_each_from_one_generator():
    """Keys are drawn from torch's one generator, which has a lock: no two calls share a draw, whatever thread makes them."""
    query = torch.ones(1, 1, 16, 16)

    def work(_):
        return [saccade.attention(query, query, query.clone(), dropout_p=0.5, backend="reference") for _ in range(8)]

    with ThreadPoolExecutor(THREADS) as pool:
        outs = [out for found in pool.map(work, range(THREADS)) for out in found]
    assert len({tuple(out.flatten().tolist()) for out in outs}) == len(outs)


def test_threads_remember_lengths_beside_each_other():
    """Each tensor is new, so the memory of checked ones is full and dropped from all the time; a loop over it met what others added.

    Objects are collected at every turn: a collection lets another thread run in the middle of what looks like one step.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1, 1000, 1000)
    gc.callbacks.append(_yield)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_check_many, range(THREADS)))
    finally:
        gc.callbacks.remove(_yield)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert len(lengths._CHECKED) <= lengths._MAX_TENSORS + THREADS


def _yield(*_) -> None:
    time.sleep(1e-5)


def _check_many(_) -> None:
    kept, pairs = [], []
    for n in range(400):
        pairs.append(
            list(zip(range(100), range(100), strict=True))
        )  # new pairs are then made of fresh memory, which is what collects
        kept.append(torch.tensor([n % 5]))
        lengths.checked_lengths(kept[-1], 5)
        del kept[:-40]


# --- on a GPU: every kernel whose sums have one order

STREAMS, GPU_ROUNDS = 8, 3


def _on(device, n, *shapes, dtype=torch.float16):
    source = torch.Generator().manual_seed(n)
    return [torch.randn(*shape, generator=source).to(device, dtype).requires_grad_() for shape in shapes]


def _with_gradients(out, leaves):
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    return [*outs, *torch.autograd.grad(outs, leaves, [x.detach() for x in outs])]


def _dense(shape, bias=None, **options):
    """A call of `attention` with all its gradients."""

    def job(device, backend, n):
        leaves = _on(device, n, shape, shape, shape, *[] if bias is None else [bias])
        given = {"lengths": torch.arange(shape[0], device=device) % shape[2] + 1} if "lengths" in options else {}
        out = saccade.attention(*leaves, return_lse=True, backend=backend, **{**options, **given})
        return _with_gradients(out, leaves)

    return job


def _one_query(device, backend, n):
    leaves = _on(device, n, (64, 4, 1, 64), (64, 4, 65, 64), (64, 4, 65, 64))
    return _with_gradients(saccade.attention(*leaves, backend=backend), leaves)


def _packed_rows(lengths_of_rows):
    def job(device, backend, n):
        ends = torch.tensor([0, *lengths_of_rows], device=device).cumsum(0).int()
        leaves = _on(device, n, *[(int(ends[-1]), 4, 64)] * 3)
        longest = max(lengths_of_rows)
        return _with_gradients(saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend=backend), leaves)

    return job


def _dynamic(backward):
    def job(device, backend, n):
        leaves = _on(device, n, (1, 8, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64))
        leaves.append(_on(device, n, (1, 2, 512), dtype=torch.float32)[0])
        out = saccade.dynamic_mask_attention(*leaves, keep=100, sinks=n % 2, enable_gqa=True, backend=backend)
        return _with_gradients(out, leaves) if backward else [out]

    return job


def _expiry(device, backend, n):
    return [saccade.expiry(_on(device, n, (2, 3, 700), dtype=torch.float32)[0], 50, window=n % 4)]


@torch.no_grad()
def _decoding(device, backend, n):
    cache = saccade.DynamicMaskCache(64)
    tokens = [x.detach() for x in _on(device, n, (2, 8, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64))]
    tokens.append(_on(device, n, (2, 2, 100), dtype=torch.float32)[0].detach())
    outs = [cache.attend(*(x[:, :, :90] for x in tokens), enable_gqa=True)]
    outs += [cache.attend(*(x[:, :, i : i + 1] for x in tokens), enable_gqa=True, backend=backend) for i in range(90, 100)]
    return outs


def _nm(pattern, **options):
    def job(device, backend, n):
        leaves = _on(device, n, *[(2, 4, 256, 64)] * 3)
        out = saccade.nm_sparse_attention(*leaves, pattern=pattern, return_lse=True, backend=backend, **options)
        return _with_gradients(out, leaves)

    return job


@torch.no_grad()
def _staged(device, backend, n):
    query, key, value = _on(device, n, *[(2, 4, 256, 64)] * 3)
    weights = saccade.nm_sparse.scores(query.detach(), key.detach(), pattern="2:4", backend=backend).softmax()
    return [weights.values, weights.metadata, weights.matmul(value.detach())]


KERNELS = [
    (_dense((64, 4, 65, 64)), "short"), (_dense((64, 4, 49, 32), bias=(1, 4, 49, 49)), "short"), (_dense((32, 4, 128, 64), is_causal=True), "short"),
    (_one_query, "short"), (_dense((16, 4, 100, 64), lengths=True), "ragged"), (_packed_rows((3, 64, 31, 17)), "ragged"),
    (_packed_rows((100, 128, 77)), "ragged"), (_packed_rows((300, 150)), "ragged"), (_dense((8, 4, 197, 64)), "long"),
    (_dense((4, 4, 512, 64), lengths=True), "long"), (_dynamic(False), "gather"), (_expiry, "auto"), (_decoding, "decode"),
    (_nm("2:4"), "mma_sp"), (_nm("1:2", is_causal=True), "mma_sp"), (_nm("4:8"), "masked"), (_staged, "mma_sp"),
]  # fmt: skip
# whose backward adds in any order, unless torch is asked for one
IN_ORDER_IF_ASKED = [(_dynamic(True), "gather"), (_dense((8, 4, 130, 64)), "volta")]


def _words(tensors):
    return [x.detach().contiguous().view(torch.uint8) for x in tensors]


def _runs(device, kernels):
    """(kernel, backend, seed) of those that take their call here, and what each gives alone, twice the same."""
    found = {}
    for index, (job, backend) in enumerate(kernels):
        for n in range(GPU_ROUNDS):
            try:
                alone = _words(job(device, backend, n))
            except saccade.UnsupportedProblem:
                break
            again = _words(job(device, backend, n))
            assert all(torch.equal(x, y) for x, y in zip(alone, again, strict=True)), f"{backend}, job {index}, alone"
            found[index, n] = alone
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [False, True], ids=["by themselves", "under use_deterministic_algorithms"])
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_threads_agree_on_a_gpu(asked):
    """Sixteen threads that share eight streams, two to a stream; forward and backward."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked, warn_only=True)
    try:
        kernels = IN_ORDER_IF_ASKED if asked else KERNELS
        alone = _runs("cuda", kernels)
        assert {backend for _, backend in kernels} & {"short", "gather"} <= {kernels[index][1] for index, _ in alone}
        _together(kernels, alone)
    finally:
        torch.use_deterministic_algorithms(before)


def _together(kernels, alone) -> None:
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    order, start = list(alone), threading.Barrier(THREADS)

    def work(number):
        start.wait()
        found = {}
        with torch.cuda.stream(streams[number % STREAMS]):
            for i in range(len(order)):
                index, n = order[(i + number * len(order) // THREADS) % len(order)]
                job, backend = kernels[index]
                found[index, n] = _words(job("cuda", backend, n))
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for found in list(pool.map(work, range(THREADS))):
            for (index, n), expected in alone.items():
                same = all(torch.equal(x, y) for x, y in zip(found[index, n], expected, strict=True))
                assert same, f"{kernels[index][1]}, job {index}, seed {n}"


@pytest.mark.parametrize("kernel", range(len(KERNELS) + len(IN_ORDER_IF_ASKED)))
def test_what_threads_call_on_a_gpu_runs_on_a_cpu_too(kernel):
    """In plain torch: the calls are right, and their results differ from seed to seed."""
    job, backend = [*KERNELS, *IN_ORDER_IF_ASKED][kernel]
    # the kernel for any pattern would run in Triton's interpreter, for a minute
    plain = "reference" if backend in ("mma_sp", "masked") else "auto"
    first, again, other = (job("cpu", plain, n) for n in (0, 0, 1))
    assert len(first) >= (1 if backend in ("gather", "auto") else 3)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


if __name__ == "__main__":
    agree()
