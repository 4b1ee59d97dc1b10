"""A model whose forward is replayed: what packed and padded encoders have in common."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from saccade.encoders import attention
from saccade.encoders.gpu import Gpu
from saccade.encoders.state import State
from saccade.engine.problem import captured
from saccade.engine.switch import REASON, is_disabled

_logger = logging.getLogger("saccade")
OF_LOSSES = "num_items_in_batch"  # Trainer gives it to a head, which passes it on; no encoder reads it


def has_graphs(device: torch.device) -> bool:
    """Whether a device runs CUDA graphs."""
    return device.type == "cuda"


class Encoder:
    """A model whose forward is replayed. share: of the memory that was free, which graphs may hold."""

    attention = attention.NAME  # its attention function while it is served; empty for a model that keeps its own
    fallback = "it runs unpadded, without graphs"
    packs = False  # whether its batches are packed

    def __init__(self, model: Any, share: float):
        self.model, self.stock = model, model.forward
        self.signature = inspect.signature(self.stock)
        self.state, self.lock, self.share = State(model), threading.RLock(), share
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

    def say(self, sentence: str) -> None:
        """A warning, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            _logger.warning(sentence)

    def _bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments of a call by their names, and why it runs as it is; empty if nothing speaks against it."""
        if is_disabled():
            return {}, REASON
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return {}, "the call is traced"
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
        return self._gpu
