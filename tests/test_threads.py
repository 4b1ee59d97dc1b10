"""Sixteen threads that call every operation at once get what one thread gets, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


def expiry(n, backend):
    return [saccade.expiry(_tensors(n, 2, 3, 50 + n % 4, count=1)[0], 1 + n % 9, window=n % 4)]


def nm_sparse(n, backend):
    query, key, value = _leaves(*_tensors(n, 2, 2, 12 + n % 6, 8))
    out = saccade.nm_sparse_attention(query, key, value, pattern=("2:4", "1:2")[n % 2], backend=backend)
    return [out, *torch.autograd.grad(out.sum(), (query, key, value))]


CALLS = [
    *((call, backend) for call in (attention, padded, packed, varlen) for backend in ("auto", "reference")),
    (packed, "sdpa"), (varlen, "sdpa"), (dynamic_mask, "auto"), (dynamic_mask, "gather_torch"), (dynamic_mask, "reference"), (expiry, "auto"),
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
    """Each tensor is new, so the memory of checked ones is full and dropped from all the time; a loop over it met what others added."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_check_many, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert len(lengths._CHECKED) <= lengths._MAX_TENSORS + THREADS


def _check_many(_) -> None:
    kept = []
    for n in range(400):
        kept.append(torch.tensor([n % 5]))
        lengths.checked_lengths(kept[-1], 5)
        del kept[:-40]


@pytest.mark.gpu
def test_threads_agree_on_a_gpu():
    """Each thread on a stream of its own; forward alone, whose sums have one order."""
    tensors = [t.cuda().half() for t in _tensors(0, 64, 4, 65, 64)]
    expected = saccade.attention(*tensors, backend="short")

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [saccade.attention(*tensors, backend="short") for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(torch.equal(out, expected) for found in pool.map(work, range(THREADS)) for out in found)


if __name__ == "__main__":
    agree()
