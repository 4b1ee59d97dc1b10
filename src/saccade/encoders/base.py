"""A model whose forward is replayed: what packed and padded encoders have in common."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.encoders import attention, locks
from saccade.encoders.fused import Fusion
from saccade.encoders.gpu import Gpu
from saccade.encoders.state import State
from saccade.engine.problem import captured
from saccade.engine.switch import REASON, is_disabled
from saccade.engine.tracing import observer

_logger = logging.getLogger("saccade")
# Tokens of the runs for which layers are compiled. The compiler shapes its kernels by them: with 16, GELU took 149 us of 19,463 tokens, and 47 in eager
# (H100). With 2,048 it took 76 us of 11,264 in BERT-base, and with 8,192 it takes 52 (H200). Backward keeps what it needs of all layers, some
# 0.7 GB of BERT-base in bfloat16 at 2,048.
_EXAMPLE, _TRAINING_EXAMPLE = 8192, 2048
OF_LOSSES = "num_items_in_batch"  # Trainer gives it to a head, which passes it on; no encoder reads it


def has_graphs(device: torch.device) -> bool:
    """Whether a device runs CUDA graphs."""
    return device.type == "cuda"


class Encoder:
    """A model whose forward is replayed. share: of the memory that was free, which graphs may hold. fuse: whether its layers are compiled."""

    attention = attention.NAME  # its attention function while it is served; empty for a model that keeps its own
    fallback = "it runs unpadded, without graphs"
    packs = False  # whether its batches are packed

    def __init__(self, model: Any, share: float, fuse: bool = False):
        self.model, self.stock = model, model.forward
        self.before = getattr(getattr(model, "config", None), "_attn_implementation", None)  # its attention as stock
        self.fusion = Fusion(model) if fuse else None
        if fuse:
            self.attention = attention.OPAQUE
        self.signature = inspect.signature(self.stock)
        self.state, self.lock, self.share = State(model), locks.lock(), share
        self.graphs: OrderedDict[tuple, Any] = OrderedDict()  # by (state, slot, size), least recently used first
        self.failed = ""  # why nothing is captured
        self.last = "no call yet"
        self._gpu: Gpu | None = None
        self._said: set[str] = set()

    def inputs(self, size: Any, device: torch.device) -> Any:
        """The memory from which a graph of a size reads."""
        raise NotImplementedError

    def outputs(self, inputs: Any) -> tuple[Tensor, ...]:
        """The tensors that the model returns for such inputs."""
        raise NotImplementedError

    def describe(self) -> str:
        """How it is computed, for `explain`."""
        raise NotImplementedError

    def fused(self) -> AbstractContextManager[None]:
        """The layers are the compiled ones, if there are any, for one run of the model's forward."""
        return nullcontext() if self.fusion is None else self.fusion.active()

    def fused_state(self, example: Callable[[int], tuple[Tensor, ...]], number: int | None = None) -> int:
        """The number of the model's state. Before the first graph of a state, its layers are compiled, and weights put side by side.

        example: the outputs of a run of so many tokens, as graphs run them. number: the state, if the caller has read it.
        """
        number, fusion = self.state.read() if number is None else number, self.fusion
        if fusion is None or fusion.failed or self.failed or self.state.watched or not has_graphs(self.state.tensors[0].device):
            return number
        if not fusion.knows(number):
            self.say(
                f"{type(self.model).__name__}: torch.compile works on its layers, once for all sizes; fuse=False leaves it out"
            )
            number = fusion.ready(self.state, partial(self._as_captured, example, _EXAMPLE))
        if torch.is_grad_enabled() and self.state.parameters:
            fusion.ready_to_train(self.state, number, partial(self._as_captured, example, _TRAINING_EXAMPLE))
        self._say_failure(fusion)
        return number

    def _say_failure(self, fusion: Fusion) -> None:
        if fusion.failed:
            self.say(f"{type(self.model).__name__}: {fusion.failed}; its layers run as they are")

    def _as_captured(self, example: Callable[[int], tuple[Tensor, ...]], tokens: int) -> tuple[Tensor, ...]:
        kind = self.state.tensors[0].device.type
        with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
            return example(tokens)

    def as_stock(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward. Only eager attention gives weights, so a model that had it has it for a call that asks for them."""
        if torch.compiler.is_compiling():
            return self.stock(*args, **kwargs)
        if not attention.is_packed():
            return self._as_stock(args, kwargs)
        with attention.packed(None):  # a part of another encoder, which is packed, may make this call
            return self._as_stock(args, kwargs)

    def _as_stock(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.before != "eager" or not self.attention:
            return self.stock(*args, **kwargs)
        config: Any = self.model.config
        # no call of another thread reads the config meanwhile: its mask would be of another kind than its attention
        with self.lock:
            asked = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
            if not asked or config._attn_implementation != self.attention:
                return self.stock(*args, **kwargs)
            config._attn_implementation = self.before
            try:
                return self.stock(*args, **kwargs)
            finally:
                config._attn_implementation = self.attention

    def say(self, sentence: str) -> None:
        """A warning, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            _logger.warning(sentence)

    def _bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments of a call by their names, and why it runs as it is; empty if nothing speaks against it."""
        if is_disabled():
            return {}, REASON
        if seen := observer():
            return {}, seen
        if captured():
            return {}, "a CUDA graph of the caller is captured"
        return self._named(args, kwargs)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        if not args:
            return kwargs, ""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return {}, str(error)
        return given | given.pop("kwargs", {}), ""

    def _graphs_on(self, device: torch.device) -> Gpu:
        if self._gpu is None or self._gpu.device != device:
            self.graphs.clear()
            self._gpu = Gpu(self, device)
        self._gpu.follow()
        return self._gpu
