"""Layers of an encoder compiled by torch: one product for query, key and value, and the small kernels between the products fused.

A layer is compiled once for all numbers of tokens, with a graph break at its attention, which stays the kernel that a capture chooses. The model's own
forward runs it, so no model is rewritten.
"""

from __future__ import annotations

import inspect
import operator
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.fx.experimental._config as _symbols
from torch import Tensor, fx, nn

from saccade.encoders import joined
from saccade.encoders.state import State
from saccade.encoders.views import move_views_out, with_views

_active = threading.local()  # `fusion`: whose layers this thread runs
# the compiler tries more shapes of its kernels: 11.6 ms in place of 12.4 of a BERT-base step of 5,181 tokens (H100)
_OPTIONS = {"max_autotune_pointwise": True}
_VARIANTS = 64  # variants of one layer's code (models, dtypes, modes); torch's limit of 8 would leave the ninth uncompiled


class Fusion:
    """The compiled layers of one model.

    Attributes:
        failed: why nothing is compiled; empty if nothing failed.
        seconds: what torch's compiler took for forward so far, without the tracing before it. Backward is compiled when it first runs.
    """

    def __init__(self, model: nn.Module, backend: str = "inductor"):
        self.model, self.backend = model, backend
        self.failed, self.seconds = "", 0.0
        self._joined: list[joined.Joined] = []
        self._ready: set[int] = set()  # states whose products have been looked at
        self._trained: set[int] = set()  # states whose backward is compiled

    def knows(self, number: int) -> bool:
        """Whether nothing is left to do for a state."""
        return bool(self.failed) or number in self._ready

    def ready(self, state: State, run: Callable[[], Any]) -> int:
        """The number of the state, after a run that compiles the layers and moves the weights of their products side by side."""
        number = state.read()
        try:
            with joined.looking() as wanted, torch.inference_mode(False), torch.no_grad(), self.active():
                run()
        except RuntimeError as error:
            self.fail(error)
            return number
        moved = joined.join(self.model, wanted)
        self._joined = [x for x in self._joined if x.holds()] + moved
        number = state.read()
        if len(self._ready) >= _VARIANTS:
            self._ready.clear()
        self._ready.add(number)
        return number

    def ready_to_train(self, state: State, number: int, run: Callable[[], tuple[Tensor, ...]]) -> None:
        """Compile the backward of a state, once: for the outputs of this run, not for those of the first batch, which may be small."""
        if self.failed or number in self._trained:
            return
        self._trained.add(number)
        try:
            with torch.random.fork_rng([state.tensors[0].device]), torch.enable_grad(), self.active():
                outputs = [x for x in run() if x.requires_grad]
                torch.autograd.grad(outputs, state.parameters, [torch.zeros_like(x) for x in outputs], allow_unused=True)
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Compile nothing from here on."""
        self.failed = f"torch.compile failed ({' '.join(str(error).split())[:200]})"

    def undo(self) -> None:
        """Give the parameters separate memory again."""
        for x in self._joined:
            x.separate()
        self._joined = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """The layers of the model are the compiled ones, for one run of its forward."""
        places = [] if self.failed else [x for x in parts_of(self.model) if "forward" not in x.__dict__]
        for module in places:
            # without transformers' wrapper, whose code all layers of all models share
            forward = inspect.unwrap(type(module).forward)
            module.__dict__["forward"] = partial(_compiled(forward, self.backend), module)
        _active.fusion = self
        try:
            # with duck shapes, torch would compile a separate variant if the number of tokens equals a width
            with torch._dynamo.config.patch(recompile_limit=_VARIANTS), _symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                yield
        finally:
            _active.fusion = None
            for module in places:
                module.__dict__.pop("forward", None)

    def describe(self) -> str:
        """For `explain`."""
        if self.failed:
            return f"not fused: {self.failed}"
        if not self._ready:
            return "fused by torch.compile at its first capture"
        moved = sum([x.holds() for x in self._joined])
        took = f"which took {self.seconds:.1f} s for forward" if self.seconds else "whose kernels another model has made"
        return f"fused by torch.compile, {took}; {moved} weights and biases lie side by side"


@lru_cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A layer's forward, compiled once for all layers and models of its kind and shapes."""
    return torch.compile(forward, dynamic=True, backend=partial(_compile, backend))


def _compile(backend: str, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    from torch._dynamo import lookup_backend

    began = time.perf_counter()
    try:
        join_products(graph)
        outs = move_views_out(graph)
        options = {"config_patches": _OPTIONS} if backend == "inductor" else {}
        return with_views(lookup_backend(backend)(graph, inputs, **options), outs)
    finally:
        fusion = getattr(_active, "fusion", None)
        if fusion is not None:
            fusion.seconds += time.perf_counter() - began


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The parts that are compiled: the layers, which stand in the innermost ModuleLists of a model, and the embeddings of its tokens."""
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList)]
    innermost = [x for x in lists if not any(isinstance(y, nn.ModuleList) for layer in x for y in layer.modules())]
    layers = [layer for x in innermost for layer in x]
    embeddings = getattr(model, "embeddings", None)
    if not isinstance(embeddings, nn.Module) or any(isinstance(x, nn.Conv2d) for x in embeddings.modules()):
        return layers  # its embeddings are mostly a convolution over patches, with which nothing is fused
    return [*layers, embeddings]


def join_products(graph: fx.GraphModule) -> int:
    """Make one product of those that `nn.Linear` modules apply to the same tensor, in place; returns how many groups were joined.

    ```
    x Wq' + bq, x Wk' + bk, x Wv' + bv  =  the three parts of  x [Wq; Wk; Wv]' + [bq; bk; bv]
    ```
    """
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch._C._nn.linear and not node.kwargs:
            x, weight, bias = (*node.args, None)[:3]
            if weight.op in ("placeholder", "get_attr") and (bias is None or bias.op in ("placeholder", "get_attr")):
                groups.setdefault((x, bias is None, _dtype(weight)), []).append(node)
    wanted = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in wanted:
        _join(graph.graph, nodes)
    if wanted:
        graph.recompile()
    return len(wanted)


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, Tensor) else None


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One product in the place of several."""
    first = nodes[0]
    x = first.args[0]
    weights = [node.args[1] for node in nodes]
    biases = [node.args[2] for node in nodes if len(node.args) > 2 and node.args[2] is not None]
    widths = [weight.meta["example_value"].shape[0] for weight in weights]  # type: ignore[union-attr]
    with graph.inserting_before(first):
        product = graph.call_function(joined.product, (x, weights, biases))
        parts = graph.call_function(torch.split, (product, widths, -1))
        for i, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (parts, i))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)
