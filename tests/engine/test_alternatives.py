"""A kernel that does not compile: `auto` continues with another and warns once, while a backend requested by its name raises.
Kernels are broken on purpose."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import saccade
import saccade.dynamic_mask.prepared
import saccade.exact.explained
import saccade.exact.prepared
import saccade.nm_sparse.prepared
from saccade.engine import prepare
from saccade.engine.alternatives import Alternatives
from saccade.engine.backend import Backend
from saccade.errors import CompileError
from saccade.exact.short import launch
from saccade.launch import disabled
from saccade.launch import triton as launching
from saccade.native.recording import Recorder, shares
from saccade.nvrtc import Source, toolchain

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


class Broken:
    """Replaces a Triton kernel, and fails like its compiler."""

    __name__ = "_broken_kernel"

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            raise RuntimeError("PassManager::run failed")

        return launch


def forget_launches() -> None:
    """Forget launches, so that they are planned again."""
    prepare.forget()
    launch.forget()


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is disabled before and after the test; failures of the interpreter count like those of the compiler."""
    monkeypatch.setattr(launching, "_compiles", lambda: True)
    for forget in (disabled.forget, prepare.forget, toolchain._given_up.clear):
        forget()
    yield monkeypatch
    for forget in (disabled.forget, prepare.forget, toolchain._given_up.clear):
        forget()


def prefer(monkeypatch, operation: str, *names: str) -> None:
    """Let `auto` take these first, on a CPU too."""
    modules = {
        "attention": (saccade.exact.explained, saccade.exact.prepared),
        "dynamic_mask_attention": (saccade.dynamic_mask.prepared,),
        "nm_sparse_attention": (saccade.nm_sparse.prepared,),
    }
    for module in modules[operation]:
        chosen = [dataclasses.replace(b, prefers=lambda problem, own=b.name: own in names) for b in module.BACKENDS]
        monkeypatch.setattr(module, "BACKENDS", tuple(chosen))


def inputs(length: int = 20, heads: int = 2, dim: int = 16):
    torch.manual_seed(3)
    return [torch.randn(2, heads, length, dim, device=DEVICE, requires_grad=True) for _ in range(3)]


def compared(call, by_name, leaves, message):
    """`call()` gives what `by_name()` gives, gradients too, and warns once; returns the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, lse = call()
        found = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
        call()
    told = [str(w.message) for w in caught if "computes instead" in str(w.message)]
    assert len(told) == 1, told
    assert message in told[0]
    assert "report" in told[0]
    assert "saccade info" in told[0]
    expected_out, expected_lse = by_name()
    expected = torch.autograd.grad((expected_out, expected_lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    for mine, theirs in zip((out, lse, *found), (expected_out, expected_lse, *expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["_fwd_kernel", "_bwd_kernel"])
def test_attention(fresh, direction):
    from saccade.exact.short import plans_triton

    fresh.setattr(plans_triton, direction, Broken())
    forget_launches()
    prefer(fresh, "attention", "short")
    query, key, value = leaves = inputs(21)

    def call(backend="auto"):
        return saccade.attention(query, key, value, is_causal=True, return_lse=True, backend=backend)

    told = r"Triton .* cannot compile _broken_kernel \(torch [^)]*\)\nRuntimeError: PassManager::run failed"
    with pytest.raises(CompileError, match=told):
        call("short")[0].sum().backward()
    compared(call, lambda: call("reference"), leaves, "cannot compile _broken_kernel")
    assert "short: disabled: Triton" in saccade.explain(query, key, value, is_causal=True, return_lse=True)
    # calls of other shapes try it again
    assert "-> short" in saccade.explain(*(x[:, :1] for x in leaves)) or "short: could" in saccade.explain(
        *(x[:, :1] for x in leaves)
    )


def test_packed_input_and_dropout_keep_their_bits(fresh):
    from saccade.exact.short import plans_triton

    qkv = torch.randn(2, 19, 3, 2, 16, device=DEVICE, requires_grad=True)
    bias = torch.randn(1, 2, 19, 19, device=DEVICE, requires_grad=True)

    def call(backend):
        torch.manual_seed(11)
        return saccade.attention_qkvpacked(qkv, bias, 0.3, return_lse=True, backend=backend)

    expected, expected_lse = call("short")
    expected_gradients = torch.autograd.grad(
        (expected, expected_lse), (qkv, bias), (torch.ones_like(expected), torch.ones_like(expected_lse))
    )
    fresh.setattr(plans_triton, "_bwd_kernel", Broken())
    forget_launches()
    prefer(fresh, "attention", "short")
    prepare.forget()
    out, lse = call("auto")
    with pytest.warns(RuntimeWarning, match="_broken_kernel"):
        gradients = torch.autograd.grad((out, lse), (qkv, bias), (torch.ones_like(out), torch.ones_like(lse)))
    for mine, theirs in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_dynamic_masks(fresh):
    from saccade.dynamic_mask.gather import launchers

    for name in ("_gather_fwd_kernel", "_gather_dq_kernel"):
        fresh.setattr(launchers, name, Broken())
    fresh.setattr(launchers, "build_lists", lambda *call: SimpleNamespace(keys=torch.zeros(1, 1, 1), counts=torch.zeros(1, 1)))
    prefer(fresh, "dynamic_mask_attention", "gather")
    query, key, value = inputs(40)
    scores = torch.randn(2, 2, 40, device=DEVICE, requires_grad=True)

    def call(backend="auto"):
        return saccade.dynamic_mask_attention(query, key, value, scores, keep=9, return_lse=True, backend=backend)

    with pytest.raises(CompileError, match="cannot compile _broken_kernel"):
        call("gather")
    compared(call, lambda: call("gather_torch"), (query, key, value, scores), "backend 'gather_torch' computes instead")


@pytest.mark.parametrize("direction", ["_masked_fwd_kernel", "_masked_dq_kernel"])
def test_nm_sparse(fresh, direction):
    from saccade.nm_sparse.masked import launchers

    fresh.setattr(launchers, direction, Broken())
    prefer(fresh, "nm_sparse_attention", "masked")
    query, key, value = leaves = inputs(48)

    def call(backend="auto"):
        return saccade.nm_sparse_attention(query, key, value, pattern="1:2", return_lse=True, backend=backend)

    with pytest.raises(CompileError, match="cannot compile _broken_kernel"):
        call("masked")[0].sum().backward()
    compared(call, lambda: call("reference"), leaves, "backend 'reference' computes instead")


def failing(sentence):
    """A kernel whose first launch fails like this."""

    class Faulty(Broken):
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                raise RuntimeError(sentence)

            return launch

    return Faulty()


def test_errors_of_a_running_device_pass(fresh):
    kernel = failing("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        launching.first_launch(kernel, (1, 1, 1), (torch.zeros(1),), {})
    assert not isinstance(caught.value, CompileError)


@pytest.mark.parametrize(
    "fault",
    [
        "device kernel image is invalid",
        "no kernel image is available for execution on the device",
        "a PTX JIT compilation failed",
        "the provided PTX was compiled with an unsupported toolchain.",
    ],
)
def test_a_binary_that_the_driver_cannot_load_does_not_compile(fresh, fault):
    with pytest.raises(CompileError, match=f"cannot compile _broken_kernel .*\\nRuntimeError: .*{fault}"):
        launching.first_launch(failing(f"Triton Error [CUDA]: {fault}"), (1, 1, 1), (torch.zeros(1),), {})


def test_a_failure_is_told_once_whatever_it_disables(fresh):
    errors = [CompileError(f"Triton cannot compile {name}", (), "error") for name in ("one", "one", "another")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape, error in enumerate(errors):
            disabled.disable(("backend", shape), "torch's function", error)
    assert [str(w.message).partition(";")[0] for w in caught] == ["Triton cannot compile one", "Triton cannot compile another"]
    assert [disabled.failure_of(("backend", shape)) for shape in range(4)] == [*errors, None]


@pytest.mark.parametrize("architecture", [None, "90a"], ids=["the next backend", "without NVRTC"])
def test_what_a_failed_backend_launched_is_no_part_of_the_call(fresh, architecture):
    """C++ would replay it: shares of a bias's gradient that no launch writes would be added to it."""
    forgotten, tried = [], []
    fresh.setattr(prepare, "forget", lambda: forgotten.append(len(tried)))

    def run(found):
        tried.append(found)
        shares((2, 3, 4, 5), 2, torch.device("cpu"))
        if len(tried) == 1:
            raise CompileError("the second kernel of a backend does not compile", (), "error", architecture)
        return "out"

    backends = tuple(
        Backend(name, "attention", "", why_not=lambda problem: [], prefers=lambda problem: True, launchers=lambda own=name: own)
        for name in ("first", "second")
    )
    alternatives = Alternatives("attention", backends, ("second",), None, lambda *_: None)
    query = torch.zeros(1, 1, 8, 16)
    with warnings.catch_warnings(), Recorder() as recorder:
        warnings.simplefilter("ignore")
        restarted = Mock(wraps=recorder.restart)
        recorder.restart = restarted
        assert alternatives.attempt(("first", "second"), query, query, run) == "out"
    assert tried == (["first", "second"] if architecture is None else ["first", "first"])
    assert forgotten == [1]
    assert restarted.call_count == 1
    assert recorder.shares == (1, 2, 4, 5)


def test_what_nvrtc_refuses_is_an_obstacle(fresh):
    error = CompileError("NVRTC 12.9 cannot compile some.cu for sm_90a", ("--std=c++17",), "error", "90a")
    before = toolchain.obstacles("90a")
    assert toolchain.give_up(error)
    assert toolchain.obstacles("90a") == (
        "NVRTC failed to compile a kernel in this process (NVRTC 12.9 cannot compile some.cu for sm_90a)",
    )
    assert not toolchain.give_up(error)  # already given up
    assert not toolchain.give_up(CompileError("Triton 3.6 cannot compile x", (), "error"))
    toolchain._given_up.clear()
    assert toolchain.obstacles("90a") == before


@pytest.mark.sm90
def test_sm90_forms_give_way_to_triton(fresh, tmp_path):
    from saccade.exact.short import sm90

    # the list of parameters is read before the source is compiled
    whole, path = sm90.source("forward"), tmp_path / "forward_sm90.cu"
    path.write_text("#error this is no C++\n" + whole.text())
    broken = Source(path, (whole.path.parent, *whole.headers))
    fresh.setattr(sm90, "source", lambda form: broken)
    forget_launches()
    query, key, value = (torch.randn(4096, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with pytest.warns(
        RuntimeWarning, match="cannot compile .*forward_sm90.cu for sm_90a; the Triton kernel of this call computes instead"
    ):
        out = saccade.attention(query, key, value, backend="short")
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    forget_launches()
