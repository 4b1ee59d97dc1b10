"""The main job without padding: documents with sentences of very different lengths. The stock model embeds them, and the same model after
`saccade.optimize`, which runs without padding, and on a GPU from CUDA graphs. `SentenceTransformer.encode` embeds strings. If sentence-transformers is
not installed, transformers embeds padded batches as `encode` makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from saccade.cli.demo.encoder import Encoder, FromStrings
from saccade.cli.demo.sentences import documents
from saccade.errors import SaccadeError
from saccade.hardware import has_package
from saccade.testing.timing import take_turns

PADDED, UNPADDED = "stock, padded", "saccade.optimize"
_LEAST_COSINE = 0.999


@dataclass(frozen=True)
class Row:
    """One way of feeding the encoder: its counts, the share of stock's batches that is padding, and milliseconds of both (the sum
    over calls of medians). Also the least cosine between the two embeddings of one sentence."""

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
    kind = FromStrings if has_package("sentence_transformers") else Encoder
    stock, ours = kind(device, dtype), kind(device, dtype)
    texts = documents(count)
    feedings = {
        "a document at a time": texts,
        "all sorted by length": [[sentence for text in texts for sentence in text]],
    }
    rows = []
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn())
    with optimize(ours.model) as handle, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(
            "", total=2 * repeats * sum(len(stock.parts(text)) for given in feedings.values() for text in given)
        )
        for feeding, given in feedings.items():
            progress.update(task, description=f"embedding, {feeding}")
            rows.append(_measure(feeding, given, stock, ours, repeats, lambda: progress.advance(task)))
        explained = handle.explain()
    console.print(_table(rows, dtype, kind is FromStrings))
    console.print(explained, highlight=False)
    return rows


def _measure(
    feeding: str, texts: list[list[str]], stock: Encoder, ours: Encoder, repeats: int, done: Callable[[], object]
) -> Row:
    parts = [part for text in texts for part in stock.parts(text)]
    encoders = {PADDED: stock, UNPADDED: ours}
    # a GPU captures its graphs at first use; a CPU only needs one earlier run
    for part in parts if ours.device.type == "cuda" else stock.parts(texts[0][:8]):
        for encoder in encoders.values():
            encoder.vectors(part)
    times, cosine = dict.fromkeys(encoders, 0.0), 1.0
    for part in parts:  # in turns part by part: what slows a machine slows both
        found: dict[str, Tensor] = {}

        def call(name: str, part: Any = part, found: dict[str, Tensor] = found) -> None:
            found[name] = encoders[name].vectors(part)
            done()

        calls: dict[str, Callable[[], object]] = {name: functools.partial(call, name) for name in encoders}
        for name, taken in take_turns(calls, ours.device, repeats, warm_up=0).items():
            times[name] += taken
        cosine = min(cosine, float((found[PADDED] * found[UNPADDED]).sum(-1).min()))
    if not cosine > _LEAST_COSINE:
        raise SaccadeError(
            f"embeddings of saccade.optimize differ from stock's: the least cosine is {cosine:.6f}, wanted is more than {_LEAST_COSINE}; "
            "run `saccade verify`"
        )
    masks = [batch.inputs["attention_mask"] for text in texts for batch in stock.batches(text)]
    tokens = sum(int(mask.sum()) for mask in masks)
    return Row(feeding, sum(map(len, texts)), tokens, 1 - tokens / sum(mask.numel() for mask in masks), times, cosine)


def _table(rows: list[Row], dtype: torch.dtype, from_strings: bool) -> Table:
    name = str(dtype).removeprefix("torch.")
    how = "encode from strings" if from_strings else "batches of up to 32"
    title = f"all-MiniLM-L6-v2, {rows[0].sentences} sentences, {rows[0].tokens:,} tokens, {how}, {name}, sentences a second"
    table = Table(title=title, title_justify="left")
    for column in ("sentences come", "padding", "stock/s", "saccade.optimize/s", "times stock", "least cosine"):
        table.add_column(column, justify="left" if column == "sentences come" else "right")
    for row in rows:
        table.add_row(
            row.feeding, f"{row.padding:.0%}", f"{row.speed(PADDED):,.0f}", f"{row.speed(UNPADDED):,.0f}",
            f"{row.gain:.2f}", f"{row.cosine:.6f}",
        )  # fmt: skip
    return table
