"""`saccade.distributed.attention`: torch's ring attention where it runs, and what is said where it does not."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import saccade
import saccade.distributed
from saccade.distributed import ring
from saccade.engine.torch_sdpa import torch_attention


def _refusals(rank, ranks, device):
    found = []
    tensors = [torch.randn(1, 2, 8, 16, device=device) for _ in range(3)]
    with FakeTensorMode():  # for a kernel of torch that this machine may not have
        grouped = [torch.empty(1, heads, 8, 16, dtype=torch.bfloat16, device="cuda") for heads in (2, 1, 1)]
    for given, call in ((tensors, {}), (tensors, {"is_causal": "yes"}), (grouped, {})):
        try:
            saccade.distributed.attention(*given, **call)
        except (saccade.UnsupportedProblem, saccade.InvalidArgument) as error:
            found.append(str(error))
    try:
        saccade.distributed.head_tail(tensors[0][:, :, :-2], 2)
    except saccade.InvalidArgument as error:
        found.append(str(error))
    return found


def test_refusals_name_what_was_given(two):
    for kernel, flag, shapes, length in two(_refusals):
        assert kernel.startswith("torch's ring attention has no kernel for torch.float32 on c")
        assert flag == "is_causal is 'yes'; it must be True or False"
        assert shapes.startswith(
            "query has shape [1, 2, 8, 16], key [1, 1, 8, 16], value [1, 1, 8, 16]; torch's ring attention takes"
        )
        assert length == "dim 2 has 6 entries; 2 ranks take a multiple of 4"


def _under_autocast(rank, ranks, device):
    tensors = [torch.randn(1, 2, 8, 16, device=device, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16)]
    with torch.autocast(device.type, torch.bfloat16):
        try:
            return str(saccade.distributed.attention(*tensors).dtype)
        except saccade.UnsupportedProblem as error:
            return str(error)


def test_autocast_casts_as_on_one_rank(two):
    """A CPU has no kernel for the ring, and says for which dtype."""
    for found in two(_under_autocast):
        assert found.startswith(("torch.bfloat16", "torch's ring attention has no kernel for torch.bfloat16 on cpu"))


def _no_tensors(rank, ranks, device):
    tensors = [torch.randn(1, 2, 8, 16, device=device) for _ in range(3)]
    mesh = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("a", "b"))
    sharded = [distribute_tensor(x, mesh["b"], [Shard(2)]) for x in tensors]
    calls = (
        lambda: saccade.distributed.attention(None, *tensors[1:]),
        lambda: saccade.distributed.attention(*sharded),
        lambda: saccade.distributed.attention(*tensors, group=mesh),
        lambda: saccade.distributed.head_tail(None, 0),
        lambda: saccade.distributed.head_tail(tensors[0], 4),
        lambda: saccade.distributed.head_tail(tensors[0], True),
        lambda: saccade.distributed.head_tail(tensors[0], 2.0),
    )
    found = []
    for call in calls:
        with pytest.raises(saccade.InvalidArgument) as raised:
            call()
        found.append(str(raised.value))
    return found


def test_what_is_no_tensor_no_dim_and_no_group(two):
    for nothing, sharded, mesh, tensor, *dims in two(_no_tensors):
        assert nothing == "query is a NoneType; it must be a torch.Tensor"
        assert sharded.startswith("query is a DTensor, a subclass of torch.Tensor with operations of its own")
        assert mesh.startswith("group is a device mesh of 2 dimensions; it must be ")
        assert tensor == "tensor is a NoneType; it must be a torch.Tensor"
        assert dims == [
            f"dim is {dim}; the tensor has 4 dims, so it must be a whole number from -4 to 3" for dim in (4, True, 2.0)
        ]


def _head_tail(rank, ranks, device):
    return saccade.distributed.head_tail(torch.arange(16, device=device).view(1, 16), 1).tolist()


def test_head_tail(many):
    each = 16 // (2 * many.ranks)
    chunks = [list(range(begin, begin + each)) for begin in range(0, 16, each)]
    assert many(_head_tail) == [[chunks[rank] + chunks[-1 - rank]] for rank in range(many.ranks)]


def _ring(rank, ranks, device, is_causal):
    made = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 256, 64, generator=made).to(device, torch.bfloat16).requires_grad_() for _ in range(4)]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole[:3], is_causal=is_causal)
    gradients = torch.autograd.grad(expected, whole[:3], whole[3])
    own = [saccade.distributed.head_tail(x.detach(), 2).requires_grad_() for x in whole]
    out = saccade.distributed.attention(*own[:3], is_causal=is_causal)
    found = [out, *torch.autograd.grad(out, own[:3], own[3].detach())]
    parts = [saccade.distributed.head_tail(x, 2) for x in (expected, *gradients)]
    return [((f.float() - p.float()).norm() / p.float().norm()).item() for f, p in zip(found, parts, strict=True)]


@pytest.mark.gpu  # torch's ring attention has no kernel for a CPU
@pytest.mark.parametrize("many", [(2, "cuda"), (4, "cuda"), (8, "cuda")], indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
def test_equal_to_one_device(many, is_causal):
    for distances in many(_ring, is_causal):
        assert max(distances) < 2e-2, distances


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_setting_of_torch_is_restored(is_causal):
    settings = ring._settings()
    before = settings.enable_load_balance

    def fails() -> None:
        with ring._balanced(is_causal):
            assert settings.enable_load_balance == is_causal
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert settings.enable_load_balance == before


def test_without_that_setting(monkeypatch):
    monkeypatch.setattr(ring, "_settings", lambda: None)
    with ring._balanced(True):
        pass
    with (
        pytest.raises(
            saccade.UnsupportedProblem, match=r"is_causal is False, and the ring attention of torch .*; it must be True"
        ),
        ring._balanced(False),
    ):
        pass


def test_a_replaced_function_of_torch_is_put_back(monkeypatch):
    name, other = torch_attention.__name__, object()
    monkeypatch.setattr(torch.nn.functional, name, other)
    with ring._as_torch_has_it():
        assert getattr(torch.nn.functional, name) is torch_attention
    assert getattr(torch.nn.functional, name) is other


# --- the Function around torch's ring, with torch's plain function in the place of the ring


class OneRank:
    """A mesh of one rank."""

    def size(self):
        return 1


def in_no_ring(*given):
    return ring._Ring.apply(*given, True, None, OneRank(), lambda *mesh, **buffers: contextlib.nullcontext())


def rows():
    return [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]


def test_gradients_of_the_function():
    given = rows()
    expected = torch.autograd.grad(torch_attention(*given, is_causal=True).square().sum(), given)
    out = in_no_ring(*given)
    for _ in range(2):
        found = torch.autograd.grad(out.square().sum(), given, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_hooks_see_what_is_saved_and_nothing_else_is_held():
    given, seen = [x.clone().requires_grad_() for x in rows()], []
    copy = lambda x: (seen.append(x.shape), x.clone())[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(copy, lambda x: x):
        out = in_no_ring(*[x * 1 for x in given])
    assert seen.count(given[0].shape) >= 4
    expected = torch.autograd.grad(torch_attention(*given, is_causal=True).square().sum(), given)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), expected)
    memory = [x * 1 for x in given]
    held = [weakref.ref(x.untyped_storage()) for x in memory]
    with torch.autograd.graph.saved_tensors_hooks(copy, lambda x: x):
        out = in_no_ring(*memory)
    assert all(of() is not None for of in held)
    del memory
    gc.collect()
    assert [of() for of in held] == [None] * 3


def test_backward_frees_what_was_saved():
    given = rows()
    out = in_no_ring(*given)
    loss = out.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        loss.backward()


def test_backward_holds_no_tensor_that_it_unpacked():
    given, unpacked = rows(), []

    def unpack(x):
        found = x.clone()
        unpacked.append(weakref.ref(found))
        return found

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = in_no_ring(*given)
    torch.autograd.grad(out.sum(), given, retain_graph=True)
    gc.collect()
    assert len(unpacked) >= 4
    assert [of() for of in unpacked] == [None] * len(unpacked)
    assert out.grad_fn is not None


@pytest.mark.parametrize("is_causal", [False, True])
def test_backward_has_the_setting_of_forward(is_causal):
    given, found = rows(), []

    def context(mesh, **buffers):
        found.append(ring._settings().enable_load_balance)
        return contextlib.nullcontext()

    out = ring._Ring.apply(*given, is_causal, None, OneRank(), context)
    torch.autograd.grad(out.sum(), given)
    assert found == [is_causal] * 2


def test_second_derivatives_are_refused():
    given = rows()
    (dq,) = torch.autograd.grad(in_no_ring(*given).sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), given[1])


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_an_output_that_is_changed_is_noticed(kernel):
    """Whether torch's own backward reads it or not."""
    with sdpa_kernel(kernel):
        out = in_no_ring(*rows())
    loss = out.sum()
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpointing():
    given = rows()
    expected = torch.autograd.grad(torch_attention(*given, is_causal=True).square().sum(), given)
    out = checkpoint(in_no_ring, *given, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), expected)
