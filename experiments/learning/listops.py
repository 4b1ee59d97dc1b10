"""ListOps from scratch: dense attention against scores pruned 2:4 and 1:2, forward and backward, by
`saccade.nm_sparse_attention`.

    python experiments/learning/listops.py [--out out/listops] [--variant dense --variant 2:4] [--quick]
    python experiments/learning/curves.py out/listops/listops.csv

An encoder reads an expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]` as tokens and predicts its value, 0 to 9. Operators are MAX, MIN,
MED (the lower median) and SM (sum modulo 10). Seeds train side by side (`model.py`), every variant from the same weights on the
same batches. Expressions are drawn once, `--examples` of them, and a tenth as many for the test. The majority class is right
about 0.17 of the time.

Source: the ListOps task of the Long Range Arena, which paper 003 (Table 4) trains at 2,000 tokens; here at most `--length`; `lra.py` has it at 2,048.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from multiprocessing import Pool
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Layer, StackedLinear, StackedNorm
from provenance import provenance
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

VARIANTS = ("dense", "2:4", "1:2")
OPERATORS = ("MAX", "MIN", "MED", "SM")
PAD, CLS = 0, 1
FIRST_OPERATOR, CLOSE, FIRST_DIGIT = 2, 2 + len(OPERATORS), 3 + len(OPERATORS)
VOCABULARY = FIRST_DIGIT + 10


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; the defaults are for one GPU, `quick()` for a CPU."""

    length: int = 128
    depth: int = 4
    arguments: int = 5
    examples: int = 60_000
    steps: int = 5000
    batch: int = 64  # sequences per step and seed
    every: int = 250
    seeds: int = 3
    width: int = 128
    heads: int = 4
    layers: int = 3
    lr: float = 1e-3
    backend: str = "auto"
    device: str = "cuda"

    @classmethod
    def long(cls, length: int) -> Plan:
        """Expressions of a third of `length` tokens to all of it, for `lra_tasks.py`. With more than 8 arguments or a depth above 10 most
        draws are too long: of 10 arguments one in 24 has 500 to 2,000 tokens, of 8 one in 4."""
        # nested less deep where fewer tokens are wanted, or hardly a draw is short enough
        return cls(length=length, depth=max(2, min(10, length.bit_length() - 2)), arguments=8)

    @classmethod
    def quick(cls) -> Plan:
        """Sizes for two cores: under two minutes."""
        return cls(length=48, depth=3, arguments=3, examples=2000, steps=60, batch=16, every=20, seeds=2, width=32, heads=2, layers=2, backend="reference", device="cpu")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One evaluation of one seed."""

    task: str
    variant: str
    seed: int
    step: int
    loss: float
    accuracy: float
    seconds: float
    length: int
    device: str
    torch: str
    triton: str
    driver: str
    commit: str
    date: str


class Encoder(nn.Module):
    """G encoders with learned positions that read their first token."""

    def __init__(self, plan: Plan, variant: str) -> None:
        super().__init__()
        made = [torch.Generator().manual_seed(seed) for seed in range(plan.seeds)]
        self.tokens = nn.Parameter(torch.stack([torch.randn(VOCABULARY, plan.width, generator=g) for g in made]) * 0.5)
        self.positions = nn.Parameter(torch.stack([torch.randn(plan.length, plan.width, generator=g) for g in made]) * 0.5)
        self.layers = nn.ModuleList(Layer(made, plan.width, plan.heads, variant, 0, plan.backend) for _ in range(plan.layers))
        self.norm = StackedNorm(plan.seeds, plan.width)
        self.classify = StackedLinear(made, plan.width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[G, N, 10]` of tokens `[G, N, T]`."""
        groups = tokens.shape[0]
        ids = tokens + VOCABULARY * torch.arange(groups, device=tokens.device)[:, None, None]
        x = F.embedding(ids, self.tokens.view(-1, self.tokens.shape[2])) + self.positions[:, None, : tokens.shape[2]]
        seen = (tokens != PAD).flatten(0, 1)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return self.classify(self.norm(x)[:, :, 0])


def expression(draw: random.Random, depth: int, arguments: int) -> tuple[list[int], int]:
    """(tokens, value): an operator over 2 to `arguments` arguments, nested at most `depth` deep."""
    operator = draw.randrange(len(OPERATORS))
    tokens, values = [FIRST_OPERATOR + operator], []
    for _ in range(draw.randint(2, arguments)):
        if depth > 1 and draw.random() < 0.35:
            inner, value = expression(draw, depth - 1, arguments)
        else:
            value = draw.randrange(10)
            inner = [FIRST_DIGIT + value]
        tokens += inner
        values.append(value)
    return [*tokens, CLOSE], apply(OPERATORS[operator], values)


def apply(operator: str, values: list[int]) -> int:
    """The value of an operator over its arguments."""
    if operator == "MED":
        return sorted(values)[(len(values) - 1) // 2]
    return {"MAX": max, "MIN": min, "SM": lambda v: sum(v) % 10}[operator](values)


def examples(count: int, seed: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """(tokens int64 `[count, length]`, values `[count]`): expressions of at least a third of the length, preceded by CLS and
    padded with PAD."""
    draw = random.Random(seed)
    tokens, values = torch.full((count, plan.length), PAD), torch.empty(count, dtype=torch.int64)
    made = 0
    while made < count:
        found, value = expression(draw, plan.depth, plan.arguments)
        if plan.length // 3 <= len(found) < plan.length:
            tokens[made, : len(found) + 1] = torch.tensor([CLS, *found])
            values[made] = value
            made += 1
    return tokens, values


def draw_all(plan: Plan, workers: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test examples, on the plan's device."""
    share = -(-plan.examples // workers)
    jobs = [(share, 1 + i, plan) for i in range(workers)] + [(max(200, plan.examples // 10), 0, plan)]
    with Pool(min(workers, 8)) as pool:
        drawn = pool.starmap(examples, jobs)
    train = [torch.cat(parts)[: plan.examples] for parts in zip(*drawn[:-1], strict=True)]
    return tuple(t.to(plan.device) for t in (*train, *drawn[-1]))  # type: ignore[return-value]


def train(plan: Plan, variant: str, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> Iterator[list[Row]]:
    """Train one variant with all seeds side by side; yields the rows of each evaluation."""
    tokens, values, test_tokens, test_values = data
    model = Encoder(plan, variant).to(plan.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1 - 0.9 * step / plan.steps))
    drawing = torch.Generator(plan.device).manual_seed(1)
    began = time.perf_counter()
    for step in range(1, plan.steps + 1):
        chosen = torch.randint(len(values), (plan.seeds, plan.batch), generator=drawing, device=plan.device)
        losses = F.cross_entropy(model(tokens[chosen]).flatten(0, 1), values[chosen].flatten(), reduction="none")
        each = losses.view(plan.seeds, -1).mean(1)
        optimizer.zero_grad()
        each.sum().backward()
        optimizer.step()
        rate.step()
        if step % plan.every == 0 or step == plan.steps:
            found, seconds = evaluate(model, test_tokens, test_values, plan), round(time.perf_counter() - began, 2)
            numbers = zip(range(plan.seeds), each.tolist(), found, strict=True)
            yield [
                Row(
                    "listops",
                    variant,
                    seed,
                    step,
                    round(loss, 5),
                    round(right, 5),
                    seconds,
                    plan.length,
                    *provenance(plan.device),
                )
                for seed, loss, right in numbers
            ]


@torch.no_grad()
def evaluate(model: Encoder, tokens: Tensor, values: Tensor, plan: Plan) -> list[float]:
    """Accuracy of each seed on the test examples."""
    right = torch.zeros(plan.seeds, device=tokens.device)
    for first in range(0, len(values), 500):
        part = tokens[first : first + 500].expand(plan.seeds, -1, -1)
        right += (model(part).argmax(-1) == values[first : first + 500]).sum(1)
    return (right / len(values)).tolist()


def main(arguments: list[str]) -> int:
    """Train each variant, write rows as they are measured, print a table; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/listops"), help="folder for listops.csv")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="may be repeated; all by default")
    parser.add_argument("--quick", action="store_true", help="small, on the CPU")
    for field in fields(Plan):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=None, help=f"default {field.default}")
    options = parser.parse_args(arguments)
    base = Plan.quick() if options.quick else Plan()
    plan = Plan(
        **{f.name: getattr(base, f.name) if getattr(options, f.name) is None else getattr(options, f.name) for f in fields(Plan)}
    )
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        print("listops.py: torch sees no CUDA device; --quick runs on the CPU", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    console, data = Console(), draw_all(plan)
    options.out.mkdir(parents=True, exist_ok=True)
    variants = options.variant or VARIANTS
    table = Table("variant", "accuracy by seed", "ms a step", title=f"ListOps, up to {plan.length} tokens")
    with open(options.out / "listops.csv", "w", newline="") as handle, Progress(console=console) as progress:
        writer = csv.DictWriter(handle, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for variant in variants:
            bar = progress.add_task(f"ListOps {variant}", total=plan.steps)
            for rows in train(plan, variant, data):
                writer.writerows(vars(row) for row in rows)
                handle.flush()
                progress.update(bar, completed=rows[0].step)
            scores = " ".join(f"{row.accuracy:.3f}" for row in rows)
            progress.console.print(f"listops {variant:6} accuracy {scores} after {rows[0].step} steps, {rows[0].seconds:.0f} s")
            table.add_row(variant, scores, f"{1000 * rows[0].seconds / rows[0].step:.1f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
