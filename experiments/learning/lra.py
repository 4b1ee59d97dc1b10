"""Long Range Arena in small: ListOps at 2,048 tokens, pictures as 1,024 pixels and pairs of passages of 1,024 bytes, with dense, pruned and
Nystrom attention.

    python experiments/learning/lra.py --task listops --data out/corpus --minutes 8 [--resume]     # one GPU; tasks may be repeated
    python experiments/learning/lra_curves.py out/lra/lra.csv
    python experiments/learning/lra.py --quick                                                     # a CPU, about a minute

The variants, each with three seeds, the same batches and the same first weights:

    dense, 1:2, 2:4                          trained from the start, as in Table 4
    nystrom                                  Nystromformer with --landmarks landmarks, from the start
    nystrom_tuned                            its weights trained for --tune steps more, a tenth of --steps as in Table 6
    nystrom_1:2_tuned, nystrom_2:4_tuned     the same with its two large softmaxes pruned (Fig. 17)

The tasks are those of `lra_tasks.py`, which says how they differ from the Arena's; the model is an encoder of --layers layers, rotary
positions, in bfloat16 on a GPU. A row is written after every evaluation. --minutes ends the command after the evaluation at which they are
over, with a checkpoint; --resume goes on, on a CPU with the same losses as without the break.

Each task has its budget (BUDGETS): those of ListOps and of the pictures are larger, since dense attention learns next to nothing of them in
3,000 steps, nor of 24,000 expressions in 10,000.

Source: Tables 4 and 6 of Dfss (paper 003).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from encoder_model import Classifier
from language import number_of, plan_of
from language_model import Size
from lra_tasks import Data, Sizes, data_of
from mlm import TUNED_RATE, spread
from pieces import Job, Key, check, parser_of, read, train_all
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training import Training

VARIANTS = ("dense", "1:2", "2:4", "nystrom", "nystrom_tuned", "nystrom_1:2_tuned", "nystrom_2:4_tuned")
# tokens of a text, examples for training and for the test
TASKS = {"listops": Sizes(2048, 96_000, 2000), "image": Sizes(1024, 45_000, 5000), "retrieval": Sizes(1024, 60_000, 4000)}
QUICK = {"listops": Sizes(64, 500, 100), "image": Sizes(1024, 64, 16), "retrieval": Sizes(128, 500, 100)}


@dataclass(frozen=True)
class Budget:
    """The budget of a task: optimiser steps of every variant from the start, steps between evaluations, the highest rate."""

    steps: int
    every: int
    lr: float


BUDGETS = {"listops": Budget(20_000, 1000, 1e-3), "image": Budget(20_000, 1000, 5e-4), "retrieval": Budget(3000, 500, 1e-3)}


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU. Those of 0 are the task's, `tune` a tenth of `steps`."""

    length: int = 0
    examples: int = 0
    tested: int = 0
    batch: int = 32
    steps: int = 0
    tune: int = 0
    every: int = 0
    warmup: int = 250
    lr: float = 0.0
    width: int = 128
    layers: int = 4
    landmarks: int = 64
    backend: str = "auto"
    device: str = "cuda"

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores."""
        return cls(
            batch=8,
            steps=10,
            tune=2,
            every=5,
            warmup=2,
            lr=1e-3,
            width=64,
            layers=1,
            landmarks=16,
            backend="reference",
            device="cpu",
        )

    def __post_init__(self) -> None:
        least = dict.fromkeys(("length", "examples", "tested", "warmup", "steps", "tune", "every", "lr"), 0)
        check(self, least | dict.fromkeys(("batch", "layers", "landmarks"), 1))
        if self.width < 64 or self.width % 64:
            raise ValueError(f"--width is {self.width}; it must be a multiple of 64, the features of a head")

    def of(self, task: str, variant: str) -> Plan:
        """With the task's budget where none is given, and the steps of a variant."""
        own = BUDGETS[task]
        steps = self.steps or own.steps
        filled = dataclasses.replace(
            self, steps=steps, tune=self.tune or max(1, steps // 10), every=self.every or own.every, lr=self.lr or own.lr
        )
        if variant.endswith("_tuned"):
            return dataclasses.replace(filled, steps=filled.tune, warmup=min(filled.warmup, filled.tune // 10))
        return filled

    def sizes(self, task: str, quick: bool) -> Sizes:
        """The sizes of a task."""
        own = (QUICK if quick else TASKS)[task]
        return Sizes(self.length or own.length, self.examples or own.examples, self.tested or own.tested)


@dataclass(frozen=True)
class Row:
    """One evaluation of one seed. train_loss: mean since the row before; step_ms and peak_mib: as in `language.py`."""

    task: str
    variant: str
    seed: int
    step: int
    train_loss: float
    accuracy: float
    step_ms: float
    peak_mib: float
    steps: int
    length: int
    batch: int
    examples: int
    parameters: int
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


class Run(Training):
    """One classifier in training."""

    def __init__(self, plan: Plan, data: Data, variant: str, seed: int) -> None:
        self.task, self.variant, self.seed = data, variant, seed
        plan, before = plan.of(data.name, variant), plan.of(data.name, "nystrom").steps
        attention = variant.removesuffix("_tuned")
        model = Classifier(
            Size(plan.width, plan.layers, plan.lr), data.vocabulary, attention, seed, plan.backend, plan.landmarks,
            classes=data.count, texts=data.tokens.shape[1], first=data.first, pad=data.pad, side=data.side,
        )  # fmt: skip
        tuned = variant.endswith("_tuned")
        super().__init__(plan, data.name, model, plan.lr * (TUNED_RATE if tuned else 1.0))
        self.before = before if tuned else 0

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        chosen = batch_of(len(self.task.classes), self.plan.batch, self.seed, step).to(self.task.classes.device)
        return self.task.tokens[chosen], self.task.classes[chosen]

    def _loss(self, *batch: Tensor) -> Tensor:
        tokens, classes = batch
        return F.cross_entropy(self._logits(tokens), classes)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The share of test examples that it classifies right."""
        parts = zip(*(t.split(2 * self.plan.batch) for t in (self.task.test_tokens, self.task.test_classes)), strict=True)
        right = [self._logits(tokens).argmax(-1) == classes for tokens, classes in parts]
        return torch.cat(right).float().mean().item()

    def _logits(self, tokens: Tensor) -> Tensor:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return self.model(tokens.long()).float()

    def said(self, row: Any) -> str:
        """The end of the run in a line."""
        return f"{row.task:10}{row.variant:18} seed {row.seed}: accuracy {row.accuracy:.4f}, {row.step_ms:.1f} ms a step"

    def _row(self, train_loss: float, found: float, step_ms: float, peak: float) -> Row:
        plan, task = self.plan, self.task
        return Row(
            task.name, self.variant, self.seed, self.step, round(train_loss, 5), round(found, 5), round(step_ms, 3), round(peak, 1), plan.steps,
            task.tokens.shape[2], plan.batch, len(task.classes), self.model.count, *provenance(plan.device),
        )  # fmt: skip


def batch_of(examples: int, count: int, seed: int, step: int) -> Tensor:
    """Numbers of the examples of a step; a function of seed and step, so that a run that is continued needs no more."""
    return torch.randint(examples, (count,), generator=torch.Generator().manual_seed(number_of(seed, step)))


def made_with(plan: Plan, task: str, variant: str, quick: bool) -> dict[str, Any]:
    """The columns with which each row of a run must agree."""
    sizes = plan.sizes(task, quick)
    return {"steps": plan.of(task, variant).steps, "length": sizes.length, "batch": plan.batch, "examples": sizes.examples}


def job_of(plan: Plan, out: Path, folder: Path | None, cache: Path | None, quick: bool) -> Job:
    """The job that the runs of a command share. A task is drawn when its first run begins, or read from `cache`."""
    drawn: dict[str, Data] = {}

    def begin(key: Key) -> Run:
        task, variant, seed = key
        if task not in drawn:
            drawn.clear()
            found = data_of(task, plan.sizes(task, quick), folder, cache)
            moved = {
                f.name: v.to(plan.device) for f in dataclasses.fields(found) if isinstance(v := getattr(found, f.name), Tensor)
            }
            drawn[task] = dataclasses.replace(found, **moved)
        return Run(plan, drawn[task], variant, seed)

    def base(key: Key) -> Key | None:
        return (key[0], "nystrom", key[2]) if key[1].endswith("_tuned") else None

    return Job(
        out / "lra.csv",
        Row,
        ("task", "variant", "seed"),
        begin,
        lambda key: made_with(plan, key[0], key[1], quick),
        base,
        lambda key: key[1] == "nystrom",
    )


def summary(rows: list[dict[str, str]]) -> Table:
    """The end of each whole run: accuracy over its seeds, and less that of dense attention or, where it was tuned, of `nystrom_tuned`, of the
    same seed."""
    ends = [row for row in rows if row["step"] == row["steps"]]
    at = {(row["task"], row["variant"], row["seed"]): float(row["accuracy"]) for row in ends}
    table = Table(
        title="test accuracy and its difference from dense, or from nystrom_tuned: mean ± standard deviation", padding=0
    )
    for name in ("task", "variant", "seeds", "accuracy", "difference", "ms a step"):
        table.add_column(name, no_wrap=True)
    for task, variant in dict.fromkeys((row["task"], row["variant"]) for row in ends):
        own = [row for row in ends if (row["task"], row["variant"]) == (task, variant)]
        other = "nystrom_tuned" if variant.endswith("_tuned") else "dense"
        less = [at[task, variant, r["seed"]] - at[task, other, r["seed"]] for r in own if (task, other, r["seed"]) in at]
        pace = statistics.fmean(float(row["step_ms"]) for row in own)
        table.add_row(task, variant, str(len(own)), spread([float(r["accuracy"]) for r in own]), spread(less), f"{pace:.1f}")
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; sizes that are not given are the plan's."""
    parser = parser_of(__doc__ or "", Plan, Path("out/lra"), VARIANTS)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="may be repeated; all by default")
    parser.add_argument("--cache", type=Path, help="folder where drawn examples are kept; --out by default")
    parser.add_argument("--prepare", action="store_true", help="draw the examples and end")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train, write and print; returns an exit code."""
    options, console = parse(arguments), Console()
    path = options.out / "lra.csv"
    try:
        plan = plan_of(options, Plan)
        if path.is_file() and not (options.resume or options.quick):
            raise ValueError(f"{path} is there already; --resume continues it, another --out begins anew")
        seeds = options.seed or ([0] if options.quick else [0, 1, 2])
        variants = [v for v in VARIANTS if v in (options.method or VARIANTS)]
        runs = [(task, variant, seed) for task in options.task or TASKS for seed in seeds for variant in variants]
        torch.backends.cuda.matmul.allow_tf32 = False
        folder = None if options.quick else options.data
        cache = options.cache or (None if options.quick else options.out)
        if options.prepare:
            for task in options.task or TASKS:
                data_of(task, plan.sizes(task, options.quick), folder, cache)
            return 0
        job = job_of(plan, options.out, folder, cache, options.quick)
        done = train_all(job, runs, options, plan.device, console)
    except ValueError as error:
        print(f"lra.py: {error}", file=sys.stderr)
        return 2
    console.print(summary(read(path)))
    console.print(f"rows in {path}")
    if not done:
        console.print(f"{options.minutes:g} minutes are over; the same command with --resume goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
