"""Masked language models on real text: dense attention, the dense weights with scores pruned 1:2 and 2:4, those fine-tuned, and models
pruned from the start.

    python experiments/learning/corpus.py --fetch --out out/corpus                                    # once, no GPU
    python experiments/learning/mlm.py --data out/corpus --minutes 8 [--resume]                       # one GPU
    python experiments/learning/mlm_curves.py out/mlm/mlm.csv
    python experiments/learning/mlm.py --quick                                                        # a CPU, under a minute

The methods, each with three seeds:

    dense                       torch's SDPA, --steps steps
    1:2_pruned, 2:4_pruned      the weights of the dense run of the same seed, its scores pruned, not trained further
    dense_tuned                 the same weights trained for --tune steps more: what the fine-tuning itself brings
    1:2_tuned, 2:4_tuned        the same, pruned
    1:2_reversed, 2:4_reversed  the weights tuned with pruning, run dense, not trained further
    1:2_scratch, 2:4_scratch    pruned from the start, --steps steps

A sequence is --context tokens of the corpus. A share --masked of its places is to be predicted: of these 80 % are replaced by a mask, 10 %
by a random token and 10 % stay. Batches and places are drawn by seed and step, the same for every method; held-out sequences have the same
places for every method and seed. Perplexity is that of the places that are to be predicted. A row is written after every evaluation.
--minutes ends the command after the evaluation at which they are over, with a checkpoint; --resume goes on, with the same losses as without
the break.

Source: Table 3 of Dfss (paper 003), which fine-tunes RoBERTa-large on Wikitext at 512 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import language
import torch
from captured import loss_of
from corpus import Text, bytes_of_reference, load
from encoder_model import MaskedModel
from language_model import SIZES
from pieces import Job, Key, check, parser_of, read, train_all
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import Tensor

METHODS = (
    "dense", "1:2_pruned", "2:4_pruned", "dense_tuned", "1:2_tuned", "2:4_tuned", "1:2_reversed", "2:4_reversed", "1:2_scratch", "2:4_scratch",
)  # fmt: skip
UNTRAINED = ("_pruned", "_reversed")
TUNED_RATE = 0.1  # of the highest learning rate, at most, while fine-tuning: where the cosine of the dense run ended
OF_PLACES = 10**12  # added to a batch's number, so that its places do not depend on where its pieces begin


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU."""

    context: int = 512
    batch: int = 64
    steps: int = 6000  # times batch and context: 197 million tokens
    tune: int = 600
    every: int = 500
    warmup: int = 500
    masked: float = 0.15
    tested: int = 0  # sequences of the held-out text; 0: all
    size: str = "10M"
    backend: str = "auto"
    device: str = "cuda"

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores."""
        return cls(
            context=64, batch=8, steps=60, tune=12, every=20, warmup=6, tested=32, size="tiny", backend="reference", device="cpu"
        )

    def __post_init__(self) -> None:
        check(self, {"context": 2, "batch": 1, "steps": 1, "tune": 1, "every": 1, "warmup": 0, "tested": 0})
        if not 1 <= self.places <= self.context:
            raise ValueError(f"--masked is {self.masked}; of {self.context} tokens it must choose at least one and at most all")
        if self.size not in SIZES:
            raise ValueError(f"--size is {self.size!r}; there are {', '.join(SIZES)}")

    @property
    def places(self) -> int:
        """Places of a sequence that are to be predicted."""
        return round(self.masked * self.context)

    def of(self, method: str) -> Plan:
        """With the steps of a method."""
        if method.endswith("_tuned"):
            return dataclasses.replace(self, steps=self.tune, warmup=min(self.warmup, self.tune // 10))
        return self


@dataclass(frozen=True)
class Row:
    """One evaluation; as in `language.py`, where a run that is not trained has no train_loss and no step_ms: nan."""

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
    batch: int
    steps: int
    masked: float
    corpus: str
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


class Run(language.Run):
    """One masked language model in training."""

    def __init__(self, plan: Plan, text: Text, size: str, method: str, seed: int) -> None:
        self.vocabulary = text.vocabulary
        super().__init__(plan.of(method), text, size, method, seed)
        if method.endswith("_tuned"):
            self.lr, self.before = TUNED_RATE * self.lr, plan.steps

    def _model(self, plan: Any, vocabulary: int) -> Any:
        attention, _, way = self.method.partition("_")
        return MaskedModel(SIZES[self.size], vocabulary + 1, "dense" if way == "reversed" else attention, self.seed, plan.backend)

    def rows(self) -> Iterator[Any]:
        """Train from where it stands; a row after each evaluation, and one if there is nothing to train."""
        if self.method.endswith(UNTRAINED):
            yield self._row(math.nan, self.evaluate(), math.nan, 0.0)
        else:
            yield from super().rows()

    def _made(self, pieces: Tensor, number: int) -> tuple[Tensor, ...]:
        return hidden(pieces[:, :-1], self.vocabulary, self.plan.places, number)

    def _loss(self, *batch: Tensor) -> Tensor:
        shown, places, answers = batch
        device = shown.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return loss_of(self.model(shown, places).flatten(0, 1), answers.flatten())

    def _row(self, train_loss: float, heldout: float, step_ms: float, peak: float) -> Any:
        plan = self.plan
        return Row(
            self.method, self.size, self.model.count, self.seed, self.step, self.step * plan.batch * plan.context, round(train_loss, 5),
            round(heldout, 5), round(math.exp(heldout), 4), round(step_ms, 3), round(peak, 1), plan.context, plan.batch,
            steps_of(plan, self.method), plan.masked, self.data, *provenance(plan.device),
        )  # fmt: skip


def hidden(tokens: Tensor, vocabulary: int, count: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """(shown `[B, T]`, places `[B, count]`, answers `[B, count]`) of a batch: of `count` places of each sequence about 80 % show the mask,
    which is the id `vocabulary`, 10 % a random token and 10 % what was there. A function of the tokens and the number."""
    generator = torch.Generator().manual_seed(OF_PLACES + number)
    places = torch.rand(tokens.shape, generator=generator).topk(count, dim=1).indices
    fate = torch.rand(places.shape, generator=generator)
    drawn = torch.randint(vocabulary, places.shape, generator=generator)
    places, fate, drawn = (t.to(tokens.device) for t in (places, fate, drawn))
    answers = tokens.gather(1, places)
    instead = torch.where(fate < 0.8, vocabulary, torch.where(fate < 0.9, drawn, answers))
    return tokens.scatter(1, places, instead), places, answers


def steps_of(plan: Plan, method: str) -> int:
    """The steps of a whole run."""
    return 0 if method.endswith(UNTRAINED) else plan.of(method).steps


def base_of(method: str) -> str | None:
    """The method with whose last weights another begins."""
    if method.endswith("_reversed"):
        return method.replace("_reversed", "_tuned")
    return "dense" if method.endswith(("_pruned", "_tuned")) else None


def made_with(plan: Plan, method: str, corpus: str | None) -> dict[str, Any]:
    """The columns with which each row of a run must agree."""
    return {
        "context": plan.context, "batch": plan.batch, "steps": steps_of(plan, method), "masked": plan.masked, "corpus": corpus,
    }  # fmt: skip


def job_of(plan: Plan, text: Text, out: Path) -> Job:
    """The job that the runs of a command share."""

    def base(key: Key) -> Key | None:
        method = base_of(key[1])
        return (key[0], method, key[2]) if method else None

    return Job(
        out / "mlm.csv",
        Row,
        ("size", "method", "seed"),
        lambda key: Run(plan, text, *key),
        lambda key: made_with(plan, key[1], text.name),
        base,
        lambda key: key[1] in map(base_of, METHODS),
    )


def summary(rows: list[dict[str, str]]) -> Table:
    """The end of each whole run: perplexity over its seeds, and over that of the dense run of the same seed."""
    ends = [row for row in rows if row["step"] == row["steps"]]
    dense = {row["seed"]: float(row["perplexity"]) for row in ends if row["method"] == "dense"}
    table = Table(
        "method",
        "seeds",
        "perplexity",
        "minus dense",
        "ms a step",
        title="held-out perplexity of masked tokens: mean ± standard deviation",
    )
    for method in (m for m in METHODS if m in {row["method"] for row in ends}):
        own = [row for row in ends if row["method"] == method]
        less = [float(row["perplexity"]) - dense[row["seed"]] for row in own if row["seed"] in dense]
        pace = statistics.fmean(float(row["step_ms"]) for row in own)
        table.add_row(method, str(len(own)), spread([float(r["perplexity"]) for r in own]), spread(less), f"{pace:.1f}")
    return table


def spread(values: list[float]) -> str:
    """Mean and standard deviation of values, if there are any."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; sizes that are not given are the plan's."""
    return parser_of(__doc__ or "", Plan, Path("out/mlm"), METHODS).parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train, write and print; returns an exit code."""
    options, console = parse(arguments), Console()
    path = options.out / "mlm.csv"
    try:
        plan = language.plan_of(options, Plan)
        if path.is_file() and not (options.resume or options.quick):
            raise ValueError(f"{path} is there already; --resume continues it, another --out begins anew")
        text = bytes_of_reference() if options.quick else load(options.data)
        seeds = options.seed or ([0] if options.quick else [0, 1, 2])
        runs = [(plan.size, method, seed) for seed in seeds for method in METHODS if method in (options.method or METHODS)]
        torch.backends.cuda.matmul.allow_tf32 = False
        done = train_all(job_of(plan, text, options.out), runs, options, plan.device, console)
    except ValueError as error:
        print(f"mlm.py: {error}", file=sys.stderr)
        return 2
    console.print(summary(read(path)))
    console.print(f"{plan.places} of {plan.context} tokens are predicted; rows in {path}")
    if not done:
        console.print(f"{options.minutes:g} minutes are over; the same command with --resume goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
