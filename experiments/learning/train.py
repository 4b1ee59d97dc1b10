"""Does a dynamic mask learn which keys to keep? Trains small transformers on tasks of recall and writes their accuracy.

    python experiments/learning/train.py [--out out/learning] [--task mqar ...] [--variant dynamic ...] [--quick]
    python experiments/learning/curves.py out/learning/learning.csv
    python experiments/learning/train.py --preset paper --length 4096 --variant dynamic --append   # MQAR in longer sequences, in pieces

Every query may use w of n keys, w much less than n. A sliding window of w cannot reach what the tasks ask for, dense attention
can; a dynamic mask can if its scores learn to keep the right keys. Seeds train side by side (`model.py`); all variants start from
the same weights and see the same batches. A run stops early once every seed has answered 99.9 % of a test batch right three times
in a row. --preset paper takes the sizes of the paper's MQAR for a --length of 1,024 to 8,192 and writes mqar.csv, see `Plan.paper`;
--append keeps what the CSV has of other runs, and --minutes cuts a command short. `dynamic_frozen` equals `window` by definition and runs on the first task only, unless --variant asks for it. The last
lines are a table of the mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from captured import Step, adam, add_plain, plain, set_rate
from model import VARIANTS, StackedTransformer
from pieces import appending, read
from provenance import provenance
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tasks import TASKS, Batch, Task, accuracy

STEPS = {"copy": 600, "select": 1500, "induce": 1500, "mqar": 2000}  # unless --steps is given
LEARNED = 0.999  # a run may stop here
CHECKS = 3
SHORTEST, LONGER = 64, 4  # tokens of the shortest sequences where lengths are mixed, and how many times as many the next have


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU."""

    length: int = 256
    keep: int = 32
    items: int = 8
    symbols: int = 16
    width: int = 64
    heads: int = 2
    layers: int = 2
    steps: int = 0  # 0: STEPS of the task
    batch: int = 128  # sequences per step and seed
    test: int = 256  # sequences per evaluation and seed
    every: int = 50  # steps between evaluations
    seeds: int = 3
    lr: float = 3e-3
    backend: str = "auto"
    mixed: float = 0.0  # of the steps, in which sequences have 64, 256, 1,024 .. or all tokens in turn
    dtype: str = "float32"  # or bfloat16: autocast
    positions: str = "learned"  # or rotary
    previous: int = 0  # 1: each token has the one before added
    device: str = "cuda"

    @classmethod
    def paper(cls, length: int) -> Plan:
        """MQAR at 1,024 to 8,192 tokens: 512 pairs and w = 512. Each key is asked ASKED times after the pairs, so that
        below 4,096 tokens there is room for n/8 pairs; w is n/4 below 2,048, where 512 keys would be half of all. A step has 32,768
        tokens a seed. Heads of 64 in bfloat16, because in float32 and at D = 32 no kernel of ours for sm_90 runs. Two things make it
        easier to learn: a matrix adds to each token the one before, as in Zoology's models of MQAR, and in the first three fifths of the
        steps sequences have 64, 256, 1,024 .. or all tokens in turn, as many tokens a step in all: among 1,024 keys the weight of the
        right one, and with it what a step teaches, begins at 1/1,024."""
        return cls(
            length=length, keep=min(512, length // 4), items=min(512, length // 8), symbols=512, width=128, steps=1500,
            batch=max(1, 32768 // length), test=max(1, 65536 // length), every=100, lr=3e-3, mixed=0.6, dtype="bfloat16",
            positions="rotary", previous=1,
        )  # fmt: skip

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores: copy with three variants in under a minute."""
        return cls(length=64, keep=12, items=6, symbols=8, steps=150, batch=32, test=64, every=25, seeds=2, device="cpu")


@dataclass(frozen=True)
class Row:
    """One evaluation of one seed."""

    task: str
    variant: str
    seed: int
    step: int
    loss: float
    accuracy: float
    # since the first step of the run, all seeds together
    seconds: float
    length: int
    keep: int
    items: int
    backend: str
    dtype: str
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


class Trainer:
    """One variant on one task, all seeds side by side."""

    def __init__(self, plan: Plan, task: str, variant: str) -> None:
        self.plan, self.variant, self.steps = plan, variant, steps_of(plan, task)
        self.task = Task(task, plan.length, plan.items, plan.symbols)
        self.model = StackedTransformer(
            list(range(plan.seeds)), self.task.vocabulary, plan.length,
            variant=variant, keep=plan.keep, width=plan.width, heads=plan.heads, layers=plan.layers, backend=plan.backend,
            rotary=plan.positions == "rotary", previous=bool(plan.previous),
        ).to(plan.device)  # fmt: skip
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = adam(torch.optim.Adam, trained, plan.lr, plan.device, betas=(0.9, 0.98))
        self.done, self._step = 0, Step(self._step_on, plan.device)
        self.drawing = torch.Generator(plan.device).manual_seed(1)
        self.testing = torch.Generator(plan.device).manual_seed(2)

    def run(self) -> Iterator[list[Row]]:
        """Train, and yield the rows of each evaluation."""
        began, good = time.perf_counter(), 0
        for step in range(1, self.steps + 1):
            loss = self.step()
            if step % self.plan.every and step != self.steps:
                continue
            scores, losses = self.evaluate().tolist(), loss.tolist()
            seconds = round(time.perf_counter() - began, 2)
            yield [self._row(seed, step, losses[seed], scores[seed], seconds) for seed in range(self.plan.seeds)]
            good = good + 1 if min(scores) >= LEARNED else 0
            if good == CHECKS:
                return

    def step(self) -> torch.Tensor:
        """One step of Adam; the mean loss of each seed, `[G]`, left on the device."""
        batch = self._draw(self.plan.batch, self.drawing, self.length())
        set_rate(self.optimizer, self.plan.lr * self._rate(self.done))
        self.done += 1
        return self._step(batch.tokens, batch.places, batch.answers)

    def length(self) -> int:
        """The length of the sequences of the next batch."""
        full = self.task.length
        if self.done >= self.plan.mixed * self.steps:
            return full
        shorter = max(0, math.ceil(math.log(full / SHORTEST, LONGER) - 1e-9))
        return min(full, SHORTEST * LONGER ** (self.done % (shorter + 1)))

    def _step_on(self, *batch: torch.Tensor) -> torch.Tensor:
        logits = self._logits(Batch(*batch))
        each = F.cross_entropy(logits.flatten(0, 2), batch[2].flatten(), reduction="none")
        loss = each.view(self.plan.seeds, -1).mean(1)
        self.optimizer.zero_grad()
        # a sum, so that the gradient of a seed does not depend on the number of seeds
        loss.sum().backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """Accuracy of each seed on fresh sequences, `[G]`."""
        batch = self._draw(self.plan.test, self.testing)
        return accuracy(self._logits(batch), batch.answers)

    def _logits(self, batch: Batch) -> torch.Tensor:
        """float32 also under autocast."""
        device = batch.tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.plan.dtype == "bfloat16"):
            return self.model(batch.tokens, batch.places).float()

    def _draw(self, count: int, generator: torch.Generator, length: int = 0) -> Batch:
        """count: sequences of the full length for each seed; shorter ones are as many more."""
        task = self.task.shorter(length) if 0 < length < self.task.length else self.task
        drawn = task.draw(self.plan.seeds * count * self.task.length // task.length, generator)
        return Batch(*(t.unflatten(0, (self.plan.seeds, -1)) for t in (drawn.tokens, drawn.places, drawn.answers)))

    def _rate(self, step: int) -> float:
        """A warm-up over 50 steps, then a linear decay to a tenth."""
        return min((step + 1) / 50, 1 - 0.9 * step / self.steps)

    def _row(self, seed: int, step: int, loss: float, score: float, seconds: float) -> Row:
        plan = self.plan
        return Row(
            self.task.name, self.variant, seed, step, round(loss, 5), round(score, 5), seconds,
            plan.length, plan.keep, plan.items, plan.backend, plan.dtype, *provenance(plan.device),
        )  # fmt: skip


def steps_of(plan: Plan, task: str) -> int:
    """The largest number of steps of a run."""
    return plan.steps or STEPS[task]


def runs_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(task, variant) of every run, in order."""
    tasks = options.task or (["mqar"] if options.preset else ["copy"] if options.quick else list(TASKS))
    if options.variant:
        return [(task, variant) for task in tasks for variant in options.variant]
    variants = ("dense", "window", "dynamic") if options.quick and not options.task else VARIANTS
    return [(t, v) for t in tasks for v in variants if v != "dynamic_frozen" or (t == tasks[0] and not options.preset)]


def is_whole(rows: list[dict[str, str]], plan: Plan, task: str, variant: str) -> bool:
    """Whether these rows have a run of this length to its end: the last step, or every seed right CHECKS times in a row."""
    own = [row for row in rows if (row["task"], row["variant"], row["length"]) == (task, variant, str(plan.length))]
    steps = sorted({int(row["step"]) for row in own})
    lowest = [min(float(row["accuracy"]) for row in own if row["step"] == str(step)) for step in steps[-CHECKS:]]
    complete = len(own) == plan.seeds * len(steps)
    return complete and bool(steps) and (steps[-1] == steps_of(plan, task) or (len(lowest) == CHECKS and min(lowest) >= LEARNED))


def other_rows(path: Path, plan: Plan, runs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Rows of the CSV that belong to other tasks, variants or lengths than this command's."""
    if not path.is_file():
        return []
    rows = read(path)
    if rows and list(rows[0]) != [f.name for f in fields(Row)]:
        raise ValueError(f"{path} has the columns {', '.join(rows[0])}; --append needs {', '.join(f.name for f in fields(Row))}")
    made = {(task, variant, str(plan.length)) for task, variant in runs}
    return [row for row in rows if (row["task"], row["variant"], row["length"]) not in made]


def train_all(
    plan: Plan, runs: list[tuple[str, str]], path: Path, console: Console, kept: list[dict[str, str]], minutes: float = 0
) -> list[Row]:
    """Make each run in turn; rows are written at once, so that a run that is interrupted keeps its rows. kept: rows that stay in the
    CSV. minutes: after so many the run in progress is cut and no other begins; 0: never."""
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    found: list[Row] = []
    with appending(path, [f.name for f in fields(Row)], kept) as add, Progress(console=console) as progress:
        total = progress.add_task("all runs", total=sum(steps_of(plan, task) for task, _ in runs))
        for number, (task, variant) in enumerate(runs):
            before = sum(steps_of(plan, earlier) for earlier, _ in runs[:number])
            for rows in Trainer(plan, task, variant).run():
                add(rows)
                found += rows
                progress.update(total, completed=before + rows[0].step, description=f"{task} {variant}")
                if time.monotonic() > deadline:
                    break
            scores = " ".join(f"{row.accuracy:.3f}" for row in rows)
            progress.console.print(f"{task:7}{variant:17} accuracy {scores} after {rows[0].step} steps, {rows[0].seconds:.0f} s")
            if time.monotonic() > deadline:
                progress.console.print(
                    f"{minutes:g} minutes are over: this run is cut, and {len(runs) - number - 1} are not made"
                )
                return found
        progress.update(total, completed=sum(steps_of(plan, task) for task, _ in runs), description="done")
    return found


def summary(rows: list[Row]) -> Table:
    """Last accuracy of each run, mean and standard deviation over its seeds, and the first step at which all seeds had
    learned."""
    table = Table(title="accuracy at the end: mean ± standard deviation over seeds")
    for name in ("task", "variant", "accuracy", "lowest", "steps to 0.99 (all seeds)", "ms a step"):
        table.add_column(name)
    for task, variant in dict.fromkeys((row.task, row.variant) for row in rows):
        run = [row for row in rows if (row.task, row.variant) == (task, variant)]
        last = max(row.step for row in run)
        scores = torch.tensor([row.accuracy for row in run if row.step == last], dtype=torch.float64)
        lowest = {step: min(r.accuracy for r in run if r.step == step) for step in sorted({r.step for r in run})}
        reached = next((str(step) for step, low in lowest.items() if low >= 0.99), "never")
        spread = scores.std().item() if len(scores) > 1 else 0.0
        pace = max(row.seconds for row in run) / last * 1000
        table.add_row(task, variant, f"{scores.mean():.3f} ± {spread:.3f}", f"{scores.min():.3f}", reached, f"{pace:.1f}")
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; sizes that are not given are the plan's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/learning"), help="folder for learning.csv")
    parser.add_argument("--quick", action="store_true", help="small, on the CPU: dense, window and dynamic on copy")
    parser.add_argument(
        "--preset", choices=["paper"], help="sizes of paper 004's MQAR for --length (default 1024); writes mqar.csv"
    )
    parser.add_argument("--append", action="store_true", help="keep the CSV's rows of other tasks, variants and lengths")
    parser.add_argument("--minutes", type=float, default=0, help="cut the command after so many; 0: never")
    add_plain(parser)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="may be repeated; all by default")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="may be repeated; all by default")
    for field in fields(Plan):
        default = field.default
        parser.add_argument(f"--{field.name}", type=type(default), default=None, help=f"default {default}")
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    """The default or the quick plan, with the given sizes replaced."""
    if options.quick and options.preset:
        raise ValueError("--quick and --preset are both given; each sets all sizes")
    plan = Plan.quick() if options.quick else Plan.paper(options.length or 1024) if options.preset else Plan()
    given = {f.name: getattr(options, f.name) for f in fields(Plan) if getattr(options, f.name) is not None}
    plan = Plan(**{**asdict(plan), **given})
    for name in ("length", "keep", "items", "symbols", "width", "heads", "layers", "batch", "test", "every", "seeds"):
        if getattr(plan, name) < 1:
            raise ValueError(f"--{name} is {getattr(plan, name)}; it must be at least 1")
    if plan.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {plan.dtype!r}; allowed are 'float32' and 'bfloat16'")
    if plan.positions not in ("learned", "rotary"):
        raise ValueError(f"--positions is {plan.positions!r}; allowed are 'learned' and 'rotary'")
    if plan.steps < 0:
        raise ValueError(f"--steps is {plan.steps}; it must be at least 1, or 0 for {STEPS}")
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device; --quick runs on the CPU, and --device cpu does with any sizes, slowly")
    return plan


def main(arguments: list[str]) -> int:
    """Train, write and print; returns an exit code."""
    options, console = parse(arguments), Console()
    plain(options.plain)
    try:
        plan = plan_of(options)
        runs = runs_of(options)
        for name, _ in runs:
            Task(name, plan.length, plan.items, plan.symbols)
        path = options.out / ("mqar.csv" if options.preset else "learning.csv")
        kept = other_rows(path, plan, runs) if options.append else []
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    # weights and outputs are float32 unless --dtype says otherwise; TF32 would make the variants differ by their kernels
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = train_all(plan, runs, path, console, kept, options.minutes)
    console.print(summary(rows))
    console.print(f"w = {plan.keep} of n = {plan.length} keys, {plan.items} items; rows in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
