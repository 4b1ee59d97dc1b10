"""A model in training: its steps, its rows, its checkpoint, its optimiser and its clock."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from captured import Step, adam, set_rate
from torch import Tensor, nn

LEAST = 20  # steps of a command before it may end between two evaluations
SKIPPED = 10  # steps of a command that are not timed: kernels compile and load in them


class Training(ABC):
    """One run of AdamW. plan: has steps, every, warmup and device. data: a name of what it is trained on. model: on the CPU. lr: the highest
    rate. `before`: steps that others trained its weights, 0 unless a subclass says so."""

    def __init__(self, plan: Any, data: str, model: nn.Module, lr: float) -> None:
        self.plan, self.data, self.lr, self.before, self.step = plan, data, lr, 0, 0
        self.model: Any = model.to(plan.device)
        self.optimizer = optimizer_of(self.model, lr, plan.device)
        self._step = Step(self._step_on, plan.device)
        self._losses: list[Tensor] = []  # since the row before
        self.deadline = math.inf  # of time.monotonic

    @abstractmethod
    def _batch(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step, counted from the first step of its weights; tensors on the device."""

    @abstractmethod
    def _loss(self, *batch: Tensor) -> Tensor:
        """The loss of a batch, made without waiting for the device."""

    @abstractmethod
    def evaluate(self) -> float:
        """The result on held-out data, as a row states it."""

    @abstractmethod
    def _row(self, train_loss: float, found: float, step_ms: float, peak: float) -> Any:
        """A row. found: of `evaluate`; the others are of the steps since the row before."""

    def rows(self) -> Iterator[Any]:
        """Train from where it stands; a row after each evaluation. It ends before the last step where the deadline is over."""
        plan, losses, begun = self.plan, self._losses, self.step
        clock = Clock(plan.device)
        while self.step < plan.steps:
            if time.monotonic() > self.deadline and self.step - begun >= min(LEAST, plan.every):
                return
            self.step += 1
            losses.append(self.update())
            clock.tick()
            if self.step % plan.every == 0 or self.step == plan.steps:
                step_ms, peak = clock.read()
                peak = max(peak, self.peak)
                yield self._row(torch.stack(losses).mean().item(), self.evaluate(), step_ms, peak)
                losses.clear()
                clock.restart()

    @property
    def peak(self) -> float:
        """MiB that were allocated before the step was captured, 0 where it is not: replays allocate nothing."""
        return self._step.peak / 2**20

    def update(self) -> Tensor:
        """One step of AdamW; the loss, left on the device."""
        set_rate(self.optimizer, self.lr * rate(self.step, self.plan))
        return self._step(*self._batch(self.before + self.step))

    def _step_on(self, *batch: Tensor) -> Tensor:
        loss = self._loss(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        plan = asdict(self.plan) | {"data": self.data}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**states, "step": self.step, "losses": list(self._losses), "plan": plan}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same plan and data."""
        plan = asdict(self.plan) | {"data": self.data}
        if state["plan"] != plan:
            raise ValueError(f"the checkpoint was made with {state['plan']}; this command has {plan}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self._losses = state["step"], list(state["losses"])


class Clock:
    """Mean milliseconds of a step and peak MiB since `restart`, without the first steps of the command."""

    def __init__(self, device: str) -> None:
        self.cuda, self.skip = device.startswith("cuda"), SKIPPED
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.steps, self.began = 0, time.perf_counter()

    def tick(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.steps == self.skip:
            self.skip = 0
            self.restart()

    def read(self) -> tuple[float, float]:
        """(ms a step, MiB); nan where all steps were among the first."""
        if self.cuda:
            torch.cuda.synchronize()
        mean = 1000 * (time.perf_counter() - self.began) / self.steps if self.steps and self.skip == 0 else math.nan
        return mean, torch.cuda.max_memory_allocated() / 2**20 if self.cuda else 0.0


def optimizer_of(model: torch.nn.Module, lr: float, device: str) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.0},
    ]
    return adam(torch.optim.AdamW, groups, lr, device, betas=(0.9, 0.95))


def rate(step: int, plan: Any) -> float:
    """A linear warm-up, then a cosine down to a tenth, as a share of the highest rate; steps count from 1."""
    if step <= plan.warmup:
        return step / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
