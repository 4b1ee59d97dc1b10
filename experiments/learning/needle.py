"""Passkey retrieval: small models learn to find a passkey in real text, and are tested over its depth at the length of training and at
twice that.

    python experiments/learning/needle.py --data out/corpus --minutes 8 [--resume]     # one GPU
    python experiments/learning/language_curves.py out/needle/needle.csv
    python experiments/learning/needle.py --quick                                      # a CPU, a minute or two

A sequence is text of the corpus; at depth d (0: the start, 1: just before the question) it holds a mark and `digits` digits, and it ends
with a question and the digits again, which the model has to predict. Mark, question and digits are tokens of their own, as filler is in
`tasks.py`: the score of a key sees that key, not the query. Models are trained from scratch on this alone, with text of the training
documents; tests take text of the held-out ones. In the first steps batches have sequences of an eighth, a quarter, half and all of the length in
turn, and as many times more, so that a step has the same number of tokens; and a training sequence asks for its passkey --asked times, the last
time at its end, since five answers in a thousand tokens teach little. Tests ask once. A passkey counts only if every digit is right; digits alone, guessed, are right 0.1 of
the time.

Source: the needle in a haystack of paper 004, whose details are not in the text that we have; the form is the usual one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from captured import Step, add_plain, plain, set_rate
from corpus import Text, bytes_of_reference, load
from language import plan_of
from language_model import METHODS, SIZES, LanguageModel
from pieces import appending, read
from provenance import provenance
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from training import optimizer_of, rate

EXTRA = 12  # tokens after the vocabulary of the text: the mark, the question, ten digits
SEED_OF_TESTS = 7


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU."""

    context: int = 1024
    keep: int = 128
    digits: int = 5
    batch: int = 32  # sequences of the whole length in a step
    steps: int = 2400
    asked: int = 8  # questions of a training sequence, as far as they come after the passkey
    mixed: float = 0.6  # of the steps, in which sequences have several lengths
    warmup: int = 100
    lr: float = 0.0  # the highest; 0: that of the size
    depths: int = 11
    tested: int = 64  # sequences for each depth and length
    size: str = "3M"
    backend: str = "auto"
    device: str = "cuda"

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores."""
        return cls(context=64, keep=16, digits=2, batch=32, steps=120, warmup=10, depths=3, tested=32, size="tiny", device="cpu")

    def __post_init__(self) -> None:
        for name, least in {
            "keep": 2,
            "digits": 1,
            "asked": 1,
            "batch": 1,
            "steps": 1,
            "warmup": 0,
            "depths": 2,
            "tested": 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be at least {least}")
        if self.context < 4 * self.digits + 2:
            raise ValueError(f"--context is {self.context}; {self.digits} digits need at least {4 * self.digits + 2}")
        if not 0 <= self.mixed <= 1:
            raise ValueError(f"--mixed is {self.mixed}; it must be from 0 to 1")
        if self.size not in SIZES:
            raise ValueError(f"--size is {self.size!r}; there are {', '.join(SIZES)}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device; --quick runs on the CPU, and --device cpu does with any sizes, slowly")

    def length(self, step: int) -> int:
        """The length of the sequences of a step; steps are counted from 1."""
        lengths = [n for n in (self.context // part for part in (8, 4, 2, 1)) if n >= 4 * self.digits + 2]
        return lengths[step % len(lengths)] if step <= self.mixed * self.steps else self.context


@dataclass(frozen=True)
class Row:
    """Accuracy of one trained model at one length and depth. train_loss: of the last 50 steps; seconds: of training."""

    method: str
    seed: int
    length: int
    depth: float
    accuracy: float
    digit_accuracy: float
    train_loss: float
    seconds: float
    context: int
    keep: int
    digits: int
    steps: int
    size: str
    corpus: str
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


def draw(
    text: Tensor, vocabulary: int, length: int, depths: Tensor, digits: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(tokens int64 `[N, length]`, answers `[N, digits]`), a sequence for each of `depths` in 0 .. 1. The logits of the last `digits`
    positions predict the answers; the inputs there are the question and all digits but the last. All on the generator's device."""
    count, device = len(depths), generator.device
    mark, ask, zero = vocabulary, vocabulary + 1, vocabulary + 2
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator, device=device)
    tokens = text[starts + torch.arange(length, device=device)].long()
    key = torch.randint(10, (count, digits), generator=generator, device=device) + zero
    place = (depths * (length - 2 * digits - 1)).round().long()[:, None]
    tokens.scatter_(1, place, mark)
    tokens.scatter_(1, place + 1 + torch.arange(digits, device=device), key)
    tokens[:, -digits] = ask
    tokens[:, length - digits + 1 :] = key[:, :-1]
    return tokens, key


def draw_asked(
    text: Tensor, vocabulary: int, length: int, depths: Tensor, digits: int, generator: torch.Generator, asked: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, places `[N, P]`, answers `[N, P]`) of `draw` with up to `asked` questions, each followed by the digits, at random places after the
    passkey. If a question would come before the passkey, there is text in its place, and its answer is -100."""
    tokens, key = draw(text, vocabulary, length, depths, digits, generator)
    slots = (length - digits) // (digits + 1)
    drawn = torch.rand(len(depths), slots, generator=generator, device=generator.device).argsort(1)[:, : asked - 1]
    starts = drawn[..., None] * (digits + 1)
    behind = starts > (depths * (length - 2 * digits - 1)).round().long()[:, None, None] + digits
    spans = starts + torch.arange(digits + 1, device=starts.device)
    said = torch.cat((torch.full_like(key[:, :1], vocabulary + 1), key), 1)[:, None]
    before = tokens.gather(1, spans.flatten(1)).view(spans.shape)
    tokens.scatter_(1, spans.flatten(1), torch.where(behind, said, before).flatten(1))
    answers = torch.where(behind, key[:, None], -100).flatten(1)
    last = torch.arange(length - digits, length, device=starts.device).expand_as(key)
    return tokens, torch.cat((spans[..., :-1].flatten(1), last), 1), torch.cat((answers, key), 1)


class Run:
    """One method and seed."""

    def __init__(self, plan: Plan, text: Text, method: str, seed: int) -> None:
        self.plan, self.method, self.seed, self.text = plan, method, seed, text
        self.train_tokens, self.heldout = (t.to(plan.device) for t in (text.train, text.heldout))
        size = SIZES[plan.size]
        self.model = LanguageModel(size, text.vocabulary + EXTRA, method, plan.keep, seed, plan.backend).to(plan.device)
        self.lr = plan.lr or size.lr
        self.optimizer = optimizer_of(self.model, self.lr, plan.device)
        self._step = Step(self._step_on, plan.device)

    def train(self) -> Iterator[float]:
        """Train; the loss of each 50th step."""
        plan = self.plan
        generator = torch.Generator(plan.device).manual_seed(self.seed)
        for step in range(1, plan.steps + 1):
            set_rate(self.optimizer, self.lr * rate(step, plan))
            length = plan.length(step)
            count = plan.batch * (plan.context // length)
            # a twentieth at each end: of uniform depths hardly one is just before the question, and a model on a CPU that found all
            # passkeys elsewhere found 0.34 there
            depths = (1.1 * torch.rand(count, generator=generator, device=plan.device) - 0.05).clamp(0, 1)
            batch = draw_asked(self.train_tokens, self.text.vocabulary, length, depths, plan.digits, generator, plan.asked)
            loss = self._step(*batch)
            if step % 50 == 0 or step == plan.steps:
                yield loss.item()

    def _step_on(self, *batch: Tensor) -> Tensor:
        tokens, places, answers = batch
        loss = F.cross_entropy(self._logits(tokens, places).flatten(0, 1), answers.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test(self, length: int, depth: float) -> tuple[float, float]:
        """(share of passkeys, share of digits) that are right."""
        plan, right = self.plan, []
        # the same sequences for every method and seed
        generator = torch.Generator(plan.device).manual_seed(SEED_OF_TESTS)
        depths = torch.full((plan.tested,), depth, device=plan.device)
        tokens, answers = draw(self.heldout, self.text.vocabulary, length, depths, plan.digits, generator)
        for part, wanted in zip(tokens.split(plan.batch), answers.split(plan.batch), strict=True):
            right.append(self._logits(part).argmax(-1) == wanted)
        found = torch.cat(right)
        return found.all(1).float().mean().item(), found.float().mean().item()

    def _logits(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return self.model(tokens, last=self.plan.digits if places is None else None, places=places).float()

    def rows(self, loss: float, seconds: float) -> list[Row]:
        """Every length and depth."""
        plan = self.plan
        made = []
        for length in (plan.context, 2 * plan.context):
            for number in range(plan.depths):
                depth = round(number / (plan.depths - 1), 4)
                whole, digits = self.test(length, depth)
                made.append(Row(
                    self.method, self.seed, length, depth, round(whole, 5), round(digits, 5), round(loss, 5), round(seconds, 2),
                    plan.context, plan.keep, plan.digits, plan.steps, plan.size, self.text.name, *provenance(plan.device),
                ))  # fmt: skip
        return made


def made_with(plan: Plan, corpus: str | None) -> dict[str, Any]:
    """The columns with which each row of a run must agree."""
    return {name: getattr(plan, name) for name in ("context", "keep", "digits", "steps", "size")} | {"corpus": corpus}


def whole_runs(rows: list[dict[str, str]], plan: Plan, name: str) -> set[tuple[str, int]]:
    """(method, seed) of the runs that the CSV has to the last depth."""
    wanted = {column: str(value) for column, value in made_with(plan, name).items()}
    for row in rows:
        made = {column: row[column] for column in wanted}
        if made != wanted:
            raise ValueError(f"the CSV has rows made with {made}; this command has {wanted}, which needs another --out")
    found = Counter((row["method"], int(row["seed"])) for row in rows)
    return {run for run, count in found.items() if count == 2 * plan.depths}


def run_all(plan: Plan, text: Text, runs: list[tuple[str, int]], options: argparse.Namespace, console: Console) -> bool:
    """Train and test each run; False if --minutes were over first."""
    path = options.out / "needle.csv"
    kept = read(path) if options.resume else []
    whole = whole_runs(kept, plan, text.name)
    kept = [row for row in kept if (row["method"], int(row["seed"])) in whole]
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    with appending(path, [f.name for f in fields(Row)], kept) as add, Progress(console=console) as progress:
        bar = progress.add_task("all runs", total=len(runs) * plan.steps)
        for number, (method, seed) in enumerate(runs):
            if (method, seed) in whole:
                continue
            if time.monotonic() > deadline:
                return False
            run, began = Run(plan, text, method, seed), time.perf_counter()
            for part, loss in enumerate(run.train(), 1):
                progress.update(
                    bar, completed=number * plan.steps + 50 * part, description=f"{method} seed {seed}: loss {loss:.3f}"
                )
            rows = run.rows(loss, time.perf_counter() - began)
            add(rows)
            scores = " ".join(f"{row.accuracy:.2f}" for row in rows)
            progress.console.print(f"{method:15} seed {seed}: {scores}, {rows[0].seconds:.0f} s")
            del run
    return True


def summary(rows: list[dict[str, str]]) -> Table:
    """Accuracy over all depths and seeds."""
    lengths = sorted({int(row["length"]) for row in rows})
    table = Table("method", *(f"n = {length:,}" for length in lengths), title="passkeys found, mean over depths and seeds")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [[float(r["accuracy"]) for r in rows if r["method"] == method and int(r["length"]) == n] for n in lengths]
        table.add_row(method, *(f"{sum(scores) / len(scores):.3f}" for scores in found))
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; sizes that are not given are the plan's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/corpus"), help="folder made by corpus.py")
    parser.add_argument("--out", type=Path, default=Path("out/needle"), help="folder for needle.csv")
    parser.add_argument("--quick", action="store_true", help="a tiny model on bytes of Python's reference, on the CPU")
    parser.add_argument("--method", action="append", choices=list(METHODS), help="may be repeated; all by default")
    parser.add_argument("--seed", action="append", type=int, help="may be repeated; 0, 1 and 2 by default")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after so many; 0: always")
    parser.add_argument("--resume", action="store_true", help="skip the runs that --out holds")
    add_plain(parser)
    for field in fields(Plan):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=None, help=f"default {field.default}")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train, test, write and print; returns an exit code."""
    options, console = parse(arguments), Console()
    plain(options.plain)
    path = options.out / "needle.csv"
    try:
        plan = plan_of(options, Plan)
        if path.is_file() and not (options.resume or options.quick):
            raise ValueError(f"{path} is there already; --resume continues it, another --out begins anew")
        text = bytes_of_reference() if options.quick else load(options.data)
        runs = [(m, s) for s in options.seed or ([0] if options.quick else [0, 1, 2]) for m in options.method or METHODS]
        torch.backends.cuda.matmul.allow_tf32 = False
        done = run_all(plan, text, runs, options, console)
    except ValueError as error:
        print(f"needle.py: {error}", file=sys.stderr)
        return 2
    console.print(summary(read(path)))
    console.print(f"w = {plan.keep} of {plan.context} keys in training; rows in {path}")
    if not done:
        console.print(f"{options.minutes:g} minutes are over; the same command with --resume goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
