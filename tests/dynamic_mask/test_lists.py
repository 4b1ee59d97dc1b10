"""Selection on a GPU: expiry and lists, which must equal those of plain torch entry by entry."""

from __future__ import annotations

import emulator
import pytest
import torch
from contracts.exact import DEVICE

from saccade.dynamic_mask import op
from saccade.dynamic_mask.selection import expiry_triton, lists, lists_cuda, lists_triton
from saccade.dynamic_mask.selection.intervals import block_lists, causal_expiry, intervals
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import compile_cubin
from tools.cubin import resource_usage

SCORES = {
    "random": lambda n: torch.randn(2, 3, n),
    "ties": lambda n: torch.randint(0, 5, (2, 3, n)).float(),
    "equal": lambda n: torch.zeros(2, 3, n),
    "signed zeros": lambda n: torch.where(torch.rand(2, 3, n) < 0.5, -0.0, 0.0),
    "rising": lambda n: torch.arange(n).float().expand(2, 3, n),
    "falling": lambda n: -torch.arange(n).float().expand(2, 3, n),
    "extremes": lambda n: torch.randn(2, 3, n).sign() * torch.finfo(torch.float32).max,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("length", "keep", "chunk"), [(300, 20, 64), (257, 300, 64), (300, 1, 64), (300, 70, 128), (40, 7, 2048)]
)
@pytest.mark.parametrize("scores", SCORES)
def test_expiry_equals_torch(monkeypatch, scores, length, keep, chunk, padded):
    monkeypatch.setattr(expiry_triton, "CHUNK", chunk)
    values = SCORES[scores](length).to(DEVICE)
    lengths = torch.tensor([length, length // 3], device=DEVICE) if padded else None
    found = expiry_triton.causal_expiry(values, keep, lengths)
    assert found.dtype == torch.int32
    assert torch.equal(found, causal_expiry(values, keep, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [64, 1000, 2048, 5000])
@pytest.mark.parametrize("scores", SCORES)
def test_expiry_equals_torch_at_full_size(scores, keep):
    values = SCORES[scores](20_000).to(DEVICE)
    assert torch.equal(expiry_triton.causal_expiry(values, keep), causal_expiry(values, keep))


@pytest.mark.parametrize("lengths", [None, (70, 0)], ids=["whole", "lengths"])
def test_the_kernel_by_documents(lengths, monkeypatch):
    """The kernel ranks the ranks by document, and the result is that of the documents; through the function that the operation calls."""
    torch.manual_seed(0)
    scores = torch.randn(2, 2, 90, device=DEVICE).mul(2).round()
    documents = torch.randint(0, 5, (2, 90), device=DEVICE).sort(-1).values * 2**40
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    asked = []
    monkeypatch.setattr(op, "_ranks", lambda key_scores: "gather")
    monkeypatch.setattr(op, "_ranked", lambda family, entry, *call: asked.append(entry) or expiry_triton.causal_intervals(*call))
    start, stop = op.causal_intervals(scores, 6, lengths, documents)
    assert asked == ["intervals"]
    assert torch.equal(stop, causal_expiry(scores, 6, lengths, documents))
    assert torch.equal(start, torch.arange(90, dtype=torch.int32, device=DEVICE).expand_as(start))


def test_expiry_leaves_long_lists_to_torch():
    assert (
        expiry_triton.causal_expiry(torch.zeros(1, 1, expiry_triton.MAX_KEEP + 1, device=DEVICE), expiry_triton.MAX_KEEP + 1)
        is None
    )
    assert expiry_triton.causal_expiry(torch.zeros(2, 1, 0, device=DEVICE), 4).shape == (2, 1, 0)


@pytest.fixture
def emulated(monkeypatch):
    """Launches run on the CPU."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaLaunch, "ready", emulator.ready)
    monkeypatch.setattr(lists_cuda, "THREADS", 64)
    lists_cuda.writer.cache_clear()
    yield
    lists_cuda.writer.cache_clear()


LENGTHS = [(150, 150, True), (150, 50, True), (150, 1, True), (150, 150, False), (50, 65, False)]
with_documents = pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
lengths_ptr = pytest.mark.parametrize(("length", "q_len", "causal"), LENGTHS)


def assert_lists(build, length, q_len, causal, documents, block, keep=12, device=DEVICE):
    """The results of `build(start, stop, q_len, block, most)` on random scores."""
    scores = torch.randn(2, 1, length, device=device)
    ids = torch.sort(torch.randint(0, 9, (2, length), device=device), dim=1)[0] if documents else None
    kept = intervals(scores, keep, q_len, causal, torch.tensor([length, length // 2], device=device), ids)
    start, stop = (x.contiguous() for x in kept)
    found = build(start, stop, q_len, block, keep if causal else 2 * keep)
    keys, count, whole = block_lists(start, stop, q_len, block)
    assert torch.equal(found.counts.view(count.shape), count.int())
    assert torch.equal(found.wholes.view(count.shape), whole.int())
    listed = torch.arange(keys.shape[-1], device=device) < count[..., None]
    assert torch.equal(found.keys.view(*count.shape, -1)[..., : keys.shape[-1]][listed], keys.int()[listed])


@with_documents
@lengths_ptr
@pytest.mark.parametrize(("block", "stretch"), [(16, 32), (32, 2048), (4, 32)])
def test_lists_equal_torch(monkeypatch, length, q_len, causal, documents, block, stretch):
    monkeypatch.setattr(lists_triton, "STRETCH", stretch)
    assert_lists(lists_triton.build_lists, length, q_len, causal, documents, block)


def shape_of(start, q_len, block, most):
    return lists_cuda.shape_of(start.shape[0] * start.shape[1], start.shape[2], q_len, block, most, start.device)


@with_documents
@lengths_ptr
@pytest.mark.parametrize(("block", "processors"), [(16, 4), (48, 1), (3, 64), (3, 1)])
def test_source_gives_the_lists(monkeypatch, emulated, length, q_len, causal, documents, block, processors):
    monkeypatch.setattr(lists_cuda, "multiprocessors", lambda device: processors)

    def build(start, stop, *sizes):
        return lists_cuda.build_lists(start, stop, shape_of(start, *sizes))

    assert_lists(build, length, q_len, causal, documents, block, device="cpu")


@pytest.mark.parametrize("native", [True, False])
def test_lists_by_address(request, monkeypatch, native):
    """The addresses given to the kernels in CUDA C++ hold what `build_lists` returns, whichever kernel wrote it."""
    if native:
        request.getfixturevalue("emulated")
    monkeypatch.setattr(lists, "cuda_shape", lambda *sizes: lists_cuda.shape_of(*sizes) if native else None)
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 150, device="cpu" if native else DEVICE)
    start, stop = (x.int().contiguous() for x in intervals(scores, 12, 150, True, None, None))
    held, *addresses = lists.writer(6, 150, 150, 16, 12, start.device)(start, stop)
    built = lists.build_lists(start, stop, 150, 16, 12)
    assert built.keys.shape == (6, 10, lists_triton.longest_list(150, 16, 12))
    listed = torch.arange(built.keys.shape[2], device=scores.device) < built.counts[..., None]
    memory = (held,) if native else held
    for address, tensor in zip(addresses, built, strict=True):
        found = next(part_at(x, address, tensor) for x in memory if 0 <= address - x.data_ptr() < 4 * x.numel())
        which = listed if tensor.dim() == 3 else torch.ones_like(tensor, dtype=torch.bool)
        assert torch.equal(found[which], tensor[which])


def part_at(memory, address, like):
    """The numbers at an address, in the shape of another tensor."""
    begin = (address - memory.data_ptr()) // 4
    return memory.view(-1)[begin : begin + like.numel()].view(like.shape)


@pytest.mark.parametrize("native", [True, False])
def test_sums_of_the_kernel_behind_are_zeros(request, monkeypatch, native):
    """All of them and nothing else."""
    device = "cpu" if native else DEVICE
    if native:
        request.getfixturevalue("emulated")
    monkeypatch.setattr(lists, "cuda_shape", lambda *sizes: lists_cuda.shape_of(*sizes) if native else None)
    start, stop = (x.int().contiguous() for x in intervals(torch.randn(2, 3, 151, device=device), 12, 151, True, None, None))
    memory = [torch.full((n,), 7.0, device=device) for n in (2 * 6 * 151 * 64 + 8, 6 * 151 + 8)]
    sums, more = (x[4:-4] for x in memory)
    lists.writer(6, 151, 151, 16, 12, start.device, (sums.numel(), more.numel()))(start, stop, sums, more)
    for x in memory:
        assert x[:4].eq(7).all()
        assert x[4:-4].eq(0).all()
        assert x[-4:].eq(7).all()


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_binaries_spill_nothing(architecture):
    pytest.importorskip("cuda.bindings")
    used = resource_usage(compile_cubin(lists_cuda.SOURCE, architecture, lists_cuda.options()))
    assert used["query_lists"].stack == 0


def test_lists_that_do_not_fit_shared_memory_are_left_to_triton():
    def fits(kv_len, block, most):
        return lists_cuda.fits(lists_cuda.shape_of(1, kv_len, kv_len, block, most, torch.device("cpu")))

    assert fits(100_000, 48, 5000)
    assert not fits(100_000, 48, 8000)
    assert fits(8000, 48, 8000)
    assert all(fits(100_000, block, 1024) for block in (192, 256))  # shorter stretches


@pytest.mark.gpu
@with_documents
@pytest.mark.parametrize(("length", "q_len", "causal"), [*LENGTHS, (5000, 5000, True), (3000, 3000, False), (70000, 70000, True)])
def test_lists_on_a_gpu(length, q_len, causal, documents):
    for block, keep in ((48, 12), (32, 1000), (1, 3)) if length < 10_000 else ((48, 1000), (256, 1000)):
        assert_lists(lists.build_lists, length, q_len, causal, documents, block, keep)
