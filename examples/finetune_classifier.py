"""Trains a small BERT-like classifier on real sentences of different lengths, with dropout: padded with torch, and packed with saccade.

    python examples/finetune_classifier.py [--steps 60] [--batch 32] [--width 64] [--device cuda] [--dtype bfloat16]

On a GPU, by default, the encoder has MiniLM's size and batches have 256 sentences.

The task: which part of Python's language reference (`pydoc_data`, in every Python) does a sentence come from? Both ways start from the same
weights and see the same batches:

    torch, padded      [B, S] tokens, F.scaled_dot_product_attention under a mask of the keys
    saccade, packed    the real tokens of the batch one behind another, [T], `saccade.attention_varlen_qkvpacked`

Before training, outputs and gradients of the two are compared without dropout; with it they draw different numbers from one
distribution. On a CPU there are no kernels of ours, and the gain comes only from the padding.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import re
import statistics
import sys
import time
import zlib
from dataclasses import dataclass

if __name__ == "__main__":  # threads that wait for each other sleep: on busy cores, spinning takes ten times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import saccade
from saccade.engine.prepare import wait_for_known_calls

TOPICS = ("string-methods", "customization", "import", "exceptions", "typesseq", "calls")
IDS, LONGEST, HEAD_DIM = 4096, 128, 32
TORCH, OURS = "torch, padded", "saccade, packed"
_torch_attention = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Batch:
    """Sentences one behind another: ids and places `[T]`, where each begins `[B + 1]`, and their topics `[B]`."""

    ids: Tensor
    places: Tensor
    ends: Tensor
    longest: int
    labels: Tensor

    @property
    def real(self) -> Tensor:
        """The places of the padded batch that hold a token, bool `[B, S]`."""
        return torch.arange(self.longest, device=self.ids.device) < self.ends.diff()[:, None]


class Layer(nn.Module):
    """A post-norm layer like BERT's."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor, batch: Batch, packed: bool) -> Tensor:
        """`[T, E]` packed, else `[B, S, E]`."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM))
        probability = self.dropout.p if self.training else 0.0
        if packed:
            heads = saccade.attention_varlen_qkvpacked(qkv, batch.ends, batch.longest, probability)
        else:
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            heads = _torch_attention(query, key, value, batch.real[:, None, None], probability).transpose(1, 2)
        x = self.norm1(x + self.dropout(self.merge(heads.flatten(-2))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Classifier(nn.Module):
    """Token and place embeddings, layers, and a head over the first token of each sentence."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(IDS, width), nn.Embedding(LONGEST, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, batch: Batch, packed: bool) -> Tensor:
        """Logits `[B, topics]`."""
        x = self.norm(self.words(batch.ids) + self.places(batch.places))
        if not packed:
            padded = x.new_zeros(*batch.real.shape, x.shape[-1])
            padded[batch.real] = x
            x = padded
        for layer in self.layers:
            x = layer(x, batch, packed)
        return self.head(x[batch.ends[:-1].long()] if packed else x[:, 0]).float()


def examples() -> list[tuple[list[int], int]]:
    """(token ids, topic) of each sentence; a token is a word or a mark, its id a checksum, and 0 stands in front."""
    from saccade.cli.demo.sentences import sentences_of

    found = []
    for label, sentences in enumerate(sentences_of(TOPICS, 200).values()):
        for sentence in sentences:
            words = re.findall(r"\w+|[^\w\s]", sentence.lower())[: LONGEST - 1]
            found.append(([0, *(1 + zlib.crc32(word.encode()) % (IDS - 1) for word in words)], label))
    random.Random(0).shuffle(found)
    return found


def batch_of(chosen: list[tuple[list[int], int]], device: str) -> Batch:
    """These examples, packed."""
    lengths = torch.tensor([len(ids) for ids, _ in chosen])
    ids = torch.tensor([token for ids, _ in chosen for token in ids])
    places = torch.cat([torch.arange(length) for length in lengths.tolist()])
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    labels = torch.tensor([label for _, label in chosen])
    return Batch(*(x.to(device) for x in (ids, places, ends)), int(lengths.max()), labels.to(device))


def difference(model: Classifier, batch: Batch) -> float:
    """The largest relative difference of logits and gradients between both ways without dropout, by root mean square."""
    model.eval()
    found = []
    for packed in (False, True):
        logits = model(batch, packed)
        gradients = torch.autograd.grad(F.cross_entropy(logits, batch.labels), [layer.qkv.weight for layer in model.layers])
        found.append([x.detach().double() for x in (logits, *gradients)])
    return max(((ours - theirs).norm() / theirs.norm()).item() for theirs, ours in zip(*found, strict=True))


@torch.no_grad()
def accuracy(model: Classifier, batches: list[Batch], packed: bool) -> float:
    """The share of sentences whose topic is found."""
    model.eval()
    right = sum(int((model(batch, packed).argmax(-1) == batch.labels).sum()) for batch in batches)
    return right / sum(len(batch.labels) for batch in batches)


def train(
    models: dict[str, Classifier], batches: list[Batch], console: Console
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(losses, median milliseconds of a step) of each way; the ways take turns."""
    fused = {name: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    columns = (TextColumn("training {task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(batches))
        for batch in batches:
            for name, model in models.items():
                model.train()
                begin = time.perf_counter()
                fused[name].zero_grad()
                loss = F.cross_entropy(model(batch, name == OURS), batch.labels)
                loss.backward()
                fused[name].step()
                losses[name].append(loss.item())  # a number on the host: the device has finished
                times[name].append(1e3 * (time.perf_counter() - begin))
            progress.update(task, advance=1, description=f"loss {losses[OURS][-1]:.3f}")
    return losses, {name: statistics.median(values[len(values) // 5 :]) for name, values in times.items()}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()  # where a step of the small encoder is host time
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256 if gpu else 32, help="sentences in a batch")
    parser.add_argument("--width", type=int, default=384 if gpu else 64, help=f"of the encoder, a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=6 if gpu else 2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "width", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.width % HEAD_DIM:
        parser.error(f"--width is {options.width}; it must be a multiple of {HEAD_DIM}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout is {options.dropout}; it must be at least 0 and less than 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compare, train both ways and print the table; an exit code."""
    options, console = options_of(arguments), Console()
    console.print(
        f"Comparing both ways, then {options.steps} steps of each on {options.device}. The defaults of a CPU take some 15 s on two cores."
    )
    every = examples()
    held, rest = every[:120], every[120:]
    drawn = random.Random(1)
    batches = [batch_of(drawn.sample(rest, min(options.batch, len(rest))), options.device) for _ in range(options.steps)]
    torch.manual_seed(0)
    model = Classifier(options.width, options.layers, options.dropout).to(options.device, getattr(torch, options.dtype))
    apart, allowed = difference(model, batches[0]), 1e-4 if options.dtype == "float32" else 0.1
    if not apart < allowed:
        print(f"outputs or gradients differ from torch's by {apart:.2g}; wanted < {allowed}", file=sys.stderr)
        return 1
    models = {TORCH: model, OURS: copy.deepcopy(model)}
    wait_for_known_calls(options.device)  # compiled on a machine's first use, some 20 s
    losses, times = train(models, batches, console)
    test = [batch_of(held, options.device)]
    padding = 1 - sum(len(b.ids) for b in batches) / sum(b.real.numel() for b in batches)
    title = f"{options.steps} steps of {options.batch} sentences, {padding:.0%} of padded batches is padding; outputs and gradients {apart:.0e} apart"
    table = Table(title=title, title_justify="left")
    for column in ("", "ms a step", "times torch", "last loss", "held-out accuracy"):
        table.add_column(column, justify="right" if column else "left")
    for name, milliseconds in times.items():
        last = statistics.mean(losses[name][-5:])
        found = accuracy(models[name], test, name == OURS)
        table.add_row(name, f"{milliseconds:.2f}", f"{times[TORCH] / milliseconds:.2f}", f"{last:.3f}", f"{found:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
