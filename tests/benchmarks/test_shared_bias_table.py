"""The table of biases that rows share: each call computes the same, and it runs on a CPU."""

from __future__ import annotations

import csv
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from saccade.testing.timing import Timing

pytest.importorskip("triton")


@pytest.fixture
def table(load, monkeypatch):
    made = load("tables.shared_bias")
    monkeypatch.setattr(made, "DEVICE", "cpu")
    return made


def test_every_model_is_there(table):
    assert len(set(table.SHAPES)) == len(table.SHAPES) == 16
    assert {shape.tokens for shape in table.SHAPES if shape.model == "triangle"} == {128, 256, 384, 512, 768, 1024}
    assert {shape.model for shape in table.SHAPES} == {"triangle", "T5", "Swin V2", "SwinUNETR"}


def test_problems_are_described_as_calls_are(table):
    masked = table.Shape("triangle", 6, 4, 10, 32, masked=True)
    assert str(masked) == "attention(B=6 H=4 Tq=10 Tk=10 D=32 bf16 bias[1x4x10x10]+grad key_mask grad cpu)"
    windows = table.Shape("SwinUNETR", 6, 3, 10, 16, windows=2)
    assert str(windows) == "attention(B=6 H=3 Tq=10 Tk=10 D=16 bf16 bias[2x3x10x10]+grad windows=2 grad cpu)"


def nvidia(monkeypatch):
    """A stand-in of NVIDIA's function in plain torch."""
    from saccade.integrations.triangle import triangle_attention

    module = ModuleType("cuequivariance_torch")
    module.triangle_attention = triangle_attention
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", module)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("windows", [0, 3])
def test_every_call_computes_the_same(table, windows, masked, monkeypatch):
    if windows and masked:
        pytest.skip("not in the table")
    nvidia(monkeypatch)
    monkeypatch.setattr(table, "has_package", lambda name: True)
    shape = table.Shape("small", 6, 2, 10, 8, windows, masked)
    leaves = [x.detach().double().requires_grad_() for x in shape.leaves()]
    mask, found = shape.mask(), {}
    calls = table.calls_of(shape)
    assert set(calls) == {
        "long",
        "shared_bias",
        "ragged",
        "auto",
        "sdpa",
        "flex",
        *["cuequivariance"] * (not windows),
    }  # 10 tokens are none of cuDNN's
    for name in ("auto", "sdpa", "cuequivariance"):
        if name in calls:
            out = calls[name]()(*leaves)
            found[name] = (out, *torch.autograd.grad(out.square().sum(), leaves))
    scores = leaves[0] @ leaves[1].mT * 8**-0.5
    places = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(scores.shape)]
    out = torch.softmax(table.score_mod(shape, mask, leaves[3])(scores, *places), -1) @ leaves[2]
    found["flex"] = (out, *torch.autograd.grad(out.square().sum(), leaves))
    for results in found.values():
        for x, want in zip(results, found["sdpa"], strict=True):
            torch.testing.assert_close(x, want, rtol=1e-2, atol=1e-2)


def test_cudnn_takes_what_it_has_a_gradient_for(table, monkeypatch):
    monkeypatch.setattr(table, "has_package", lambda name: name == "cudnn")
    taken = [shape for shape in table.SHAPES if "cudnn_bias" in table.calls_of(shape)]
    assert {(shape.model, shape.tokens) for shape in taken} == {
        *[("triangle", n) for n in (128, 256, 384, 512, 768, 1024)],
        ("T5", 512),
    }
    assert not any(shape.masked for shape in taken)


class _Node:
    """A tensor of a graph that notes how it is told to lie."""

    def __init__(self):
        self.told = {}

    def __getattr__(self, name):
        return lambda value: (self.told.__setitem__(name, value), self)[1]


class _Graph:
    """cuDNN's graph in float64 on the CPU: its names are those of the arguments of the real one."""

    memory: ClassVar = {}  # address -> tensor

    def __init__(self, **options):
        self.workspace = 0

    def tensor(self, name, dim, stride, data_type):
        return name

    def sdpa(self, *, q, k, v, bias, attn_scale, is_inference, name):
        assert not is_inference
        self.scale, self.results = attn_scale, [_Node(), _Node()]
        return tuple(self.results)

    def sdpa_backward(self, *, q, k, v, o, dO, stats, bias, dBias, attn_scale, name):
        self.scale, self.results = attn_scale, [_Node() for _ in range(3)]
        return tuple(self.results)

    def validate(self):
        assert all(node.told["set_output"] and "set_stride" in node.told for node in self.results)

    build_operation_graph = create_execution_plans = check_support = build_plans = lambda self, *given: None

    def get_workspace_size(self):
        return 0

    @torch.enable_grad()
    def execute(self, addresses, workspace, handle):
        t = {name: self.memory[address] for name, address in addresses.items()}
        leaves = [t[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")]
        scores = self.scale * leaves[0] @ leaves[1].mT + leaves[3]
        out = scores.softmax(-1) @ leaves[2]
        if len(self.results) == 2:
            found = (out, scores.logsumexp(-1, keepdim=True))
        else:
            *found, dbias = torch.autograd.grad(out, leaves, t["dO"])
            t["dBias"].copy_(dbias)
            torch.testing.assert_close(t["o"], out)
        for node, x in zip(self.results, found, strict=True):
            t[node].copy_(x.detach())


def test_cudnn_is_given_each_tensor_under_its_name(load, monkeypatch):
    """The graph is stood in for, as there is no GPU: its arguments lead to the right outputs and gradients."""
    module = load("cudnn_bias")
    cudnn = ModuleType("cudnn")
    cudnn.data_type = SimpleNamespace(BFLOAT16=0, HALF=1, FLOAT=2)
    cudnn.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    cudnn.create_handle, cudnn.set_stream, cudnn.pygraph = (lambda: 0), (lambda **given: None), _Graph
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    run = module.Graph.run
    monkeypatch.setattr(
        module.Graph,
        "run",
        lambda self, given: (_Graph.memory.update({x.data_ptr(): x for x in given.values()}), run(self, given)),
    )
    leaves = [torch.randn(3, 5, 2, 4).transpose(1, 2).requires_grad_() for _ in range(3)]
    leaves.append(torch.randn(1, 2, 5, 5, requires_grad=True))
    results = [f(*leaves) for f in (module.cudnn_bias, torch.nn.functional.scaled_dot_product_attention)]
    torch.testing.assert_close(*results)
    weights = torch.randn(3, 2, 5, 4)
    for x, y in zip(*[torch.autograd.grad(out, leaves, weights) for out in results], strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match="the strides are"):
        module.cudnn_bias(leaves[0], leaves[1], leaves[2].contiguous(), leaves[3])
    module._shape.cache_clear()


def test_it_runs(table, load, monkeypatch, timed_once, tmp_path):
    rows = load("rows")

    def timed(compute, leaves, dout, repeat_ms):
        def both():
            return torch.autograd.grad(compute(), leaves, dout)

        return {direction: timed_once(both) for direction in ("fwd", "bwd", "fwd+bwd")}

    def refused(*given):
        raise NotImplementedError("not here")

    shared = load("tables.short_ragged")
    monkeypatch.setattr(shared, "time_directions", timed)
    monkeypatch.setattr(shared, "NOT_RUN", (*shared.NOT_RUN, NotImplementedError, table.saccade.UnsupportedProblem))
    monkeypatch.setattr(table, "stream_bandwidth", lambda: 4e9)
    monkeypatch.setattr(table, "flex", refused)
    monkeypatch.setattr(table, "has_package", lambda name: False)
    monkeypatch.setattr(table, "SHAPES", [table.Shape("small", 4, 2, 10, 8, 0, True), table.Shape("windows", 4, 2, 10, 8, 2)])
    table.run(rows.Writer(tmp_path / "shared_bias.csv", load("machine").machine()), 1)
    found = list(csv.DictReader((tmp_path / "shared_bias.csv").open()))
    # bfloat16 is what the interpreter does not compute
    assert {(row["backend"], row["direction"]) for row in found} == {
        (name, direction) for name in ("auto", "sdpa") for direction in ("fwd", "bwd", "fwd+bwd")
    }
    assert {row["note"] for row in found} == {"small", "windows"}


def test_the_profile_of_long_compares_and_times(load, monkeypatch, capsys):
    """With the kernels of `shared_bias` in the place of those that need a GPU."""
    made = load("profile_long_bias")
    monkeypatch.setattr(made, "DEVICE", "cpu")
    shared = sys.modules["profile_shared_bias"]
    monkeypatch.setattr(shared, "DEVICE", "cpu")
    monkeypatch.setattr(shared, "DTYPE", torch.float16)  # which the interpreter computes
    monkeypatch.setattr(made, "captured", lambda call: call)
    monkeypatch.setattr(made, "measure", lambda call, *given: (call(), Timing(1.0, 1.0, 1.0))[1])
    monkeypatch.setattr(made.launchers, "forward", made.of_bias.forward)
    monkeypatch.setattr(made.launchers, "backward", made.of_bias.backward)
    arguments = ["--tokens", "20", "--rows", "3", "--heads", "1", "--dim", "16"]
    made.main([*arguments, "--mask"])
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["forward, maxima late", "forward, maxima early", "forward, shared_bias"]
    assert "dbias with 3 parts, and the rest" in names
    monkeypatch.setattr(made.launchers, "forward", lambda args: tuple([x + 1 for x in made.of_bias.forward(args)]))
    with pytest.raises(SystemExit, match="out is off by "):
        made.main(arguments)
