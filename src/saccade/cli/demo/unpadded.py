"""The main job without padding: documents of sentences of very different lengths, in padded batches as sentence-transformers makes them, embedded
by stock transformers, and by the same model after `saccade.optimize`: without padding, and on a GPU from CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from saccade.cli.demo.encoder import Batch, Encoder
from saccade.cli.demo.sentences import documents
from saccade.errors import SaccadeError
from saccade.testing.timing import take_turns

PADDED, UNPADDED = "stock, padded", "saccade.optimize"
_LEAST_COSINE = 0.999


@dataclass(frozen=True)
class Row:
    """One way of feeding the encoder: its counts, the share of padded batches that is padding, milliseconds of both
    (the sum over batches of medians), and the least cosine of the two embeddings of one sentence."""

    feeding: str
    sentences: int
    tokens: int
    padding: float
    milliseconds: dict[str, float]
    cosine: float

    @property
    def gain(self) -> float:
        """How many times as fast unpadded is."""
        return self.milliseconds[PADDED] / self.milliseconds[UNPADDED]

    def speed(self, name: str) -> float:
        """Sentences per second."""
        return 1000 * self.sentences / self.milliseconds[name]


def run(console: Console, device: torch.device, count: int, repeats: int) -> list[Row]:
    """Embed `count` sentences a document at a time, and all at once; print and return the rows.

    Raises:
        SaccadeError: embeddings of the two ways differ.
    """
    from saccade.encoders.optimize import optimize

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock, ours = Encoder(device, dtype), Encoder(device, dtype)
    texts = documents(count)
    feedings = {
        "a document at a time": [batch for text in texts for batch in stock.batches(text)],
        "all sorted by length": stock.batches([sentence for text in texts for sentence in text]),
    }
    rows = []
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn())
    with optimize(ours.model) as handle, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(map(len, feedings.values())) * 2 * (1 + repeats))
        for feeding, batches in feedings.items():
            progress.update(task, description=f"embedding, {feeding}")
            rows.append(_measure(feeding, batches, stock, ours, repeats, lambda: progress.advance(task)))
        explained = handle.explain()
    console.print(_table(rows, dtype))
    console.print(explained, highlight=False)
    return rows


def _measure(feeding: str, batches: list[Batch], stock: Encoder, ours: Encoder, repeats: int, done: Callable[[], object]) -> Row:
    theirs, found = (_vectors(encoder, batches, done) for encoder in (stock, ours))
    cosine = float((theirs * found).sum(-1).min())
    if not cosine > _LEAST_COSINE:
        raise SaccadeError(
            f"embeddings of saccade.optimize differ from stock's: the least cosine is {cosine:.6f}, wanted is more than {_LEAST_COSINE}; "
            "run `saccade verify`"
        )
    times = dict.fromkeys((PADDED, UNPADDED), 0.0)
    for batch in batches:  # in turns batch by batch: what slows a machine slows both
        calls: dict[str, Callable[[], object]] = {
            PADDED: functools.partial(_vectors, stock, [batch], done),
            UNPADDED: functools.partial(_vectors, ours, [batch], done),
        }
        for name, taken in take_turns(calls, ours.device, repeats, warm_up=0).items():
            times[name] += taken
    real = [batch.inputs["attention_mask"] for batch in batches]
    tokens = sum(int(mask.sum()) for mask in real)
    return Row(feeding, len(theirs), tokens, 1 - tokens / sum(mask.numel() for mask in real), times, cosine)


@torch.inference_mode()
def _vectors(encoder: Encoder, batches: list[Batch], done: Callable[[], object]) -> Tensor:
    """float32 on the CPU, in the order of the batches."""
    found = []
    for batch in batches:
        found.append(encoder.pool(batch))
        done()
    return torch.cat(found).float().cpu()


def _table(rows: list[Row], dtype: torch.dtype) -> Table:
    name = str(dtype).removeprefix("torch.")
    title = f"all-MiniLM-L6-v2, {rows[0].sentences} sentences, {rows[0].tokens:,} tokens, batches of up to 32, {name}, sentences a second"
    table = Table(title=title, title_justify="left")
    for column in ("sentences come", "padding", "stock/s", "saccade.optimize/s", "times stock", "least cosine"):
        table.add_column(column, justify="left" if column == "sentences come" else "right")
    for row in rows:
        table.add_row(
            row.feeding, f"{row.padding:.0%}", f"{row.speed(PADDED):,.0f}", f"{row.speed(UNPADDED):,.0f}",
            f"{row.gain:.2f}", f"{row.cosine:.6f}",
        )  # fmt: skip
    return table
