"""Trains language models on real text with dense attention, a sliding window, dynamic masks and untrained top-K, at several sizes.

    python experiments/learning/corpus.py --fetch --out out/corpus                                            # once, no GPU
    python experiments/learning/language.py --data out/corpus --size 10M --minutes 8 [--resume]               # one GPU
    python experiments/learning/language_curves.py out/language/language.csv
    python experiments/learning/language.py --quick                                                           # a CPU, under a minute

A run is one size, method and seed; the flags may be repeated. Every method sees the same batches (drawn by seed and step), for the same
number of steps, with the same learning rate. A row is written after every evaluation. --minutes ends the command after the evaluation
at which they are over, with a checkpoint; --resume skips the runs that the CSV has whole and continues one that has a checkpoint, with
the same losses as without the break.

Context 2,048 and w = 256: a query at the end may use an eighth of its keys, while a document has 2,900 tokens in the mean, so that what
a window of 256 cannot reach is there to be used.

Source: Fig. 5 of "Trainable Dynamic Mask Sparse Attention" (paper 004), which trains on SmolLMCorpus.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from captured import loss_of, plain
from corpus import Text, bytes_of_reference, load
from language_model import IDEAS, METHODS, SIZES, LanguageModel
from pieces import Job, appending, check, parser_of, read, train_all
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training import SKIPPED, Clock, Training


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU."""

    context: int = 2048
    keep: int = 256
    batch: int = 8
    steps: int = 1000  # times batch and context: 16.4 million tokens
    every: int = 250  # steps between evaluations
    warmup: int = 50
    tested: int = 0  # sequences of the held-out text; 0: all
    backend: str = "auto"
    device: str = "cuda"

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores."""
        return cls(context=128, keep=32, batch=4, steps=30, every=10, warmup=5, tested=16, device="cpu")

    def __post_init__(self) -> None:
        check(self, {"context": 2, "keep": 2, "batch": 1, "steps": 1, "every": 1, "warmup": 0, "tested": 0})


@dataclass(frozen=True)
class Row:
    """One evaluation. train_loss: mean since the row before, in nats a token; step_ms: mean of the same steps, without evaluations;
    peak_mib: of allocated memory while training, 0 on a CPU."""

    method: str
    size: str
    parameters: int
    seed: int
    step: int
    tokens: int
    train_loss: float
    heldout_loss: float
    perplexity: float
    step_ms: float
    peak_mib: float
    context: int
    keep: int
    batch: int
    steps: int
    corpus: str
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


@dataclass(frozen=True)
class Timed:
    """A step with nothing else on the GPU."""

    size: str
    method: str
    step_ms: float
    peak_mib: float
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


class Run(Training):
    """One language model in training."""

    def __init__(self, plan: Plan, text: Text, size: str, method: str, seed: int) -> None:
        self.size, self.method, self.seed = size, method, seed
        self.train, self.heldout = (t.to(plan.device) for t in (text.train, text.heldout))
        if len(self.train) <= plan.context or len(self.heldout) <= plan.context:
            raise ValueError(
                f"the text has {len(self.train)} and {len(self.heldout)} tokens; --context {plan.context} needs more"
            )
        super().__init__(plan, text.name, self._model(plan, text.vocabulary), SIZES[size].lr)

    def _model(self, plan: Any, vocabulary: int) -> Any:
        return LanguageModel(SIZES[self.size], vocabulary, self.method, plan.keep, self.seed, plan.backend)

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        return self._made(batch_of(self.train, self.plan, self.seed, step), number_of(self.seed, step))

    def _made(self, pieces: Tensor, number: int) -> tuple[Tensor, ...]:
        """The batch that `_loss` takes. number: of the batch, below 0 for held-out text; for a run that draws more than pieces."""
        return (pieces,)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out text, in sequences that do not overlap."""
        plan = self.plan
        sequences = (len(self.heldout) - 1) // plan.context
        firsts = torch.arange(min(sequences, plan.tested or sequences), device=plan.device) * plan.context
        total = torch.zeros((), dtype=torch.float64, device=plan.device)
        for number, starts in enumerate(firsts.split(plan.batch), 1):
            total += self._loss(*self._made(pieces_at(self.heldout, starts, plan.context), -number)) * len(starts)
        return total.item() / len(firsts)

    def _loss(self, *batch: Tensor) -> Tensor:
        """Mean over the tokens of a batch."""
        (pieces,) = batch
        device = pieces.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return loss_of(self.model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def said(self, row: Any) -> str:
        """The end of the run in a line."""
        return f"{self.size:5}{self.method:15} seed {self.seed}: perplexity {row.perplexity:.3f}, {row.step_ms:.1f} ms a step"

    def _row(self, train_loss: float, heldout: float, step_ms: float, peak: float) -> Row:
        plan = self.plan
        return Row(
            self.method, self.size, self.model.count, self.seed, self.step, self.step * plan.batch * plan.context,
            round(train_loss, 5), round(heldout, 5), round(math.exp(heldout), 4), round(step_ms, 3), round(peak, 1),
            plan.context, plan.keep, plan.batch, plan.steps, self.data, *provenance(plan.device),
        )  # fmt: skip


def batch_of(tokens: Tensor, plan: Plan, seed: int, step: int) -> Tensor:
    """The pieces of a step, int64 `[B, T + 1]`; a function of seed and step, so that a run that is continued needs no more."""
    generator = torch.Generator().manual_seed(number_of(seed, step))
    starts = torch.randint(len(tokens) - plan.context, (plan.batch,), generator=generator)
    return pieces_at(tokens, starts.to(tokens.device), plan.context)


def number_of(seed: int, step: int) -> int:
    """The seed for the generator of a step's batch."""
    return 1_000_003 * seed + step


def pieces_at(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    """`context + 1` tokens from each start, int64."""
    return tokens[starts[:, None] + torch.arange(context + 1, device=tokens.device)].long()


def made_with(plan: Plan, corpus: str | None) -> dict[str, Any]:
    """The columns with which each row of a run must agree."""
    return {name: getattr(plan, name) for name in ("context", "keep", "batch", "steps")} | {"corpus": corpus}


def job_of(plan: Plan, text: Text, out: Path) -> Job:
    """The job that the runs of a command share."""
    made = made_with(plan, text.name)
    return Job(out / "language.csv", Row, ("size", "method", "seed"), lambda key: Run(plan, text, *key), lambda key: made)


def clock(plan: Plan, text: Text, runs: list[tuple[str, str, int]], options: argparse.Namespace) -> int:
    """Times and memory of steps, without training to the end; they mean something where nothing else runs on the GPU."""
    plain(options.plain)
    found = []
    for size, method, seed in runs:
        run, watch = Run(plan, text, size, method, seed), Clock(plan.device)
        for _ in range(options.clock + SKIPPED):
            run.step += 1
            run.update()
            watch.tick()
        step_ms, peak = watch.read()
        peak = max(peak, run.peak)
        found.append(Timed(size, method, round(step_ms, 3), round(peak, 1), *provenance(plan.device)))
        del run
    with appending(options.out / "clock.csv", [f.name for f in fields(Timed)], []) as add:
        add(found)
    return 0


def summary(rows: list[dict[str, str]]) -> Table:
    """The end of each whole run: perplexity over its seeds, and time and memory of a step beside dense."""
    ends = [row for row in rows if row["step"] == row["steps"]]
    table = Table(title="held-out perplexity: mean ± standard deviation over seeds")
    for name in ("size", "method", "seeds", "perplexity", "ms a step", "of dense", "peak MiB", "of dense"):
        table.add_column(name)

    def mean(size: str, method: str, column: str) -> float:
        found = [float(r[column]) for r in ends if (r["size"], r["method"]) == (size, method)]
        return statistics.fmean(found) if found else math.nan

    for size, method in dict.fromkeys((row["size"], row["method"]) for row in ends):
        found = [float(r["perplexity"]) for r in ends if (r["size"], r["method"]) == (size, method)]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        cells = [size, method, str(len(found)), f"{statistics.fmean(found):.3f} ± {spread:.3f}"]
        for column in ("step_ms", "peak_mib"):
            own, dense = mean(size, method, column), mean(size, "dense", column)
            cells += [f"{own:.1f}", f"{own / dense:.2f}" if dense > 0 else "-"]
        table.add_row(*cells)
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; sizes that are not given are the plan's."""
    parser = parser_of(__doc__ or "", Plan, Path("out/language"), METHODS + IDEAS)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be repeated; all but tiny by default")
    parser.add_argument("--clock", type=int, default=0, help="time so many steps of each run, write clock.csv, and end")
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace, plan_type: type[Any] = Plan) -> Any:
    """The default or the quick plan, with the given sizes replaced."""
    quick = {f.name: getattr(plan_type.quick(), f.name) for f in fields(plan_type)} if options.quick else {}
    given = {f.name: getattr(options, f.name) for f in fields(plan_type) if getattr(options, f.name) is not None}
    return plan_type(**{**quick, **given})


def main(arguments: list[str]) -> int:
    """Train, write and print; returns an exit code."""
    options, console = parse(arguments), Console()
    path = options.out / "language.csv"
    try:
        plan = plan_of(options)
        if path.is_file() and not (options.resume or options.quick or options.clock):
            raise ValueError(f"{path} is there already; --resume continues it, another --out begins anew")
        text = bytes_of_reference() if options.quick else load(options.data)
        sizes = options.size or (["tiny"] if options.quick else [s for s in SIZES if s != "tiny"])
        seeds = options.seed or ([0] if options.quick else [0, 1, 2])
        runs = [(size, method, seed) for size in sizes for seed in seeds for method in options.method or METHODS]
        # dt_proj is multiplied in float32; TF32 would make ties among the scores
        torch.backends.cuda.matmul.allow_tf32 = False
        if options.clock:
            return clock(plan, text, runs, options)
        done = train_all(job_of(plan, text, options.out), runs, options, plan.device, console)
    except ValueError as error:
        print(f"language.py: {error}", file=sys.stderr)
        return 2
    console.print(summary(read(path)))
    console.print(f"w = {plan.keep} of {plan.context} keys; rows in {path}")
    if not done:
        console.print(f"{options.minutes:g} minutes are over; the same command with --resume goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
