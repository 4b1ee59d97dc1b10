"""A training step of an encoder as a user writes it, and where its host time goes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from encoder_captured import Padded
from torch import Tensor, nn

from saccade.encoders import served

_ROUNDS = 20


class Head(nn.Module):
    """A classifier over the first token. is_ours: batches stay on the host, where they are packed."""

    def __init__(self, encoder: Any, is_ours: bool):
        super().__init__()
        self.encoder, self.is_ours = encoder, is_ours
        parameter = next(encoder.parameters())
        self.head = nn.Linear(encoder.config.hidden_size, 10, device=parameter.device, dtype=parameter.dtype)

    def forward(self, batch: Padded) -> Tensor:
        """The loss of labels that are the place in the batch, modulo 10."""
        device = self.head.weight.device
        given = batch if self.is_ours else {name: x.to(device) for name, x in batch.items()}
        hidden = self.encoder(**given).last_hidden_state
        labels = torch.arange(hidden.shape[0], device=device) % 10
        return F.cross_entropy(self.head(hidden[:, 0]).float(), labels)


class Step:
    """Linear head, cross entropy, gradient clipping and fused AdamW. precision: makes the context of forward. capturable: AdamW may lie in a graph."""

    def __init__(self, model: Head, precision: Callable[[], contextlib.AbstractContextManager[Any]], capturable: bool):
        self.model, self.precision = model.train(), precision
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=capturable)

    def parts(self, batch: Padded) -> Iterator[str]:
        """Compute a step; yield the name of each part when it is over."""
        self.optimiser.zero_grad(set_to_none=True)
        yield "zero_grad"
        with self.precision():
            self.loss = self.model(batch)
        yield "forward"
        self.loss.backward()  # type: ignore[no-untyped-call]
        yield "backward and AccumulateGrad"
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        yield "clip"
        self.optimiser.step()
        yield "AdamW"

    def __call__(self, batch: Padded) -> Tensor:
        """The loss."""
        for _ in self.parts(batch):
            pass
        return self.loss.detach()


def host_split(step: Step, batch: Padded) -> str:
    """Host milliseconds of the parts of a step whose GPU is idle when it begins, medians; packing is a share of forward. A part that waits for the GPU
    counts its wait: a batch of the host has its number of tokens there, so none does."""
    found: dict[str, list[float]] = {}
    with _packing_timed(found):
        for _ in range(_ROUNDS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            for name in step.parts(batch):
                found.setdefault(name, []).append(time.perf_counter() - began)
                began = time.perf_counter()
    return "host " + ", ".join(f"{name} {1e3 * statistics.median(times):.2f}" for name, times in found.items()) + " ms"


@contextlib.contextmanager
def _packing_timed(into: dict[str, list[float]]) -> Iterator[None]:
    made = served.pack

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        packed = made(*given)
        into.setdefault("packing", []).append(time.perf_counter() - began)
        return packed

    served.pack = timed
    try:
        yield
    finally:
        served.pack = made
