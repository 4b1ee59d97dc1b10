"""A small language model with dynamic masks: it is trained on real text, and generates text with a cache of bounded size.

    python examples/train_language_model.py [--steps 120] [--tokens 96] [--keep 32] [--device cuda] [--prompt "The "]

The text is Python's language reference (`pydoc_data`, in every Python), read as bytes. Each layer is `saccade.nn.DynamicMaskAttention`: a
token sees the --keep best-scored tokens before it, and the scores are learned. Generation keeps at most so many keys for each head, however long the
text gets (`DynamicMaskCache`). Before that, the cache is compared with the complete history: the logits of every position must agree.

Time is linear in the length: on a GPU (sm_80 and later) kernels compute the mask, on a CPU under Linux C++, and elsewhere plain torch.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time

if __name__ == "__main__":  # threads that wait for each other sleep: on busy cores, spinning takes ten times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import saccade

BYTES, HEAD_DIM = 256, 32


class Layer(nn.Module):
    """A pre-norm layer around attention with a dynamic mask."""

    def __init__(self, width: int, keep: int) -> None:
        super().__init__()
        self.attention = saccade.nn.DynamicMaskAttention(width, width // HEAD_DIM, keep=keep)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: saccade.DynamicMaskCache | None) -> Tensor:
        """`[B, S, E]`."""
        x = x + self.attention(self.norm1(x), rotary, cache=cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, width: int, layers: int, keep: int) -> None:
        super().__init__()
        self.keep = keep
        self.words = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, keep) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: Tensor, start: int = 0, caches: list[saccade.DynamicMaskCache] | None = None) -> Tensor:
        """`[B, S]` to `[B, S, 256]`, at least float32. start: tokens before these, which `caches` hold."""
        x = self.words(ids)
        rotary = tuple(t.to(x.dtype) for t in rotary_of(start, ids.shape[1], ids.device))
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, None if caches is None else caches[i])
        logits = self.head(self.norm(x))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def new_caches(self) -> list[saccade.DynamicMaskCache]:
        """An empty cache for each layer."""
        return [saccade.DynamicMaskCache(self.keep) for _ in self.layers]


def rotary_of(start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary embedding, `[S, D]`."""
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.outer(torch.arange(start, start + length, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def text() -> Tensor:
    """The bytes of the reference, uint8 `[N]`."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8)


def drawn(corpus: Tensor, batch: int, tokens: int, generator: torch.Generator, device: str) -> Tensor:
    """Pieces of the text, int64 `[B, tokens + 1]`."""
    starts = torch.randint(len(corpus) - tokens, (batch, 1), generator=generator)
    return corpus[starts + torch.arange(tokens + 1)].long().to(device)


def loss_of(model: LanguageModel, pieces: Tensor) -> Tensor:
    """Cross entropy of each next byte, in nats."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(model: LanguageModel, corpus: Tensor, options: argparse.Namespace, console: Console) -> tuple[list[float], float]:
    """(losses, tokens per second)."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=options.steps, pct_start=0.1)
    generator, losses = torch.Generator().manual_seed(0), []
    columns = (TextColumn("training {task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=options.steps)
        for _ in range(options.steps):
            optimiser.zero_grad()
            loss = loss_of(model, drawn(corpus, options.batch, options.tokens, generator, options.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"{losses[-1]:.2f} nats a byte")
    return losses, options.steps * options.batch * options.tokens / (time.perf_counter() - begin)


@torch.no_grad()
def cache_difference(model: LanguageModel, ids: Tensor, prompt: int) -> float:
    """Largest difference of log-probabilities between the bounded cache, a byte at a time, and one call for all.

    In float64: a product of one row is rounded differently from that of many, and in float32 two keys with nearly equal scores may change places.
    """
    model = copy.deepcopy(model).double()
    caches = model.new_caches()
    parts = [model(ids[:, :prompt], 0, caches)]
    parts += [model(ids[:, i : i + 1], i, caches) for i in range(prompt, ids.shape[1])]
    stepwise, whole = torch.cat(parts, 1).log_softmax(-1), model(ids).log_softmax(-1)
    return (stepwise - whole).abs().max().item()


@torch.no_grad()
def write(model: LanguageModel, prompt: bytes, count: int, device: str, temperature: float = 0.7) -> tuple[str, list[int]]:
    """`count` bytes after the prompt, and the bytes of memory of each layer's cache before and after."""
    caches, generator = model.new_caches(), torch.Generator(device).manual_seed(0)
    ids = torch.tensor([list(prompt)], device=device)
    logits, written = model(ids, 0, caches)[:, -1], list(prompt)
    sizes = [caches[0].nbytes]
    for place in range(len(prompt), len(prompt) + count):
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        written.append(int(chosen))
        logits = model(chosen, place, caches)[:, -1]
    return bytes(written).decode(errors="replace"), [*sizes, caches[0].nbytes]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    sizes = {"steps": 2000 if gpu else 120, "batch": 32 if gpu else 8, "tokens": 1024 if gpu else 96, "keep": 128 if gpu else 32,
             "width": 256 if gpu else 64, "layers": 4 if gpu else 2, "write": 300 if gpu else 120}  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    options = parser.parse_args(arguments)
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.width % HEAD_DIM:
        parser.error(f"--width is {options.width}; it must be a multiple of {HEAD_DIM}")
    if not options.prompt:
        parser.error("--prompt is empty; it must have a letter at least")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, hold the cache against the whole history, and write; an exit code."""
    options, console = options_of(arguments), Console()
    console.print(
        f"Training for {options.steps} steps on {options.device}, then writing {options.write} bytes. The defaults of a CPU take some 20 s on two cores."
    )
    torch.manual_seed(0)
    corpus = text()
    held, rest = corpus[: len(corpus) // 20], corpus[len(corpus) // 20 :]
    model = LanguageModel(options.width, options.layers, options.keep).to(options.device)
    losses, speed = train(model, rest, options, console)
    pieces = drawn(held, 16, options.tokens, torch.Generator().manual_seed(1), options.device)
    with torch.no_grad():
        found = loss_of(model, pieces).item()
    console.print(
        f"{losses[0]:.2f} nats a byte before, {found:.2f} on held-out text after {options.steps} steps; {speed:,.0f} bytes/s"
    )
    console.print("Comparing the cache with the whole history, in float64 ...")
    apart, allowed = cache_difference(model, pieces[:2, : min(options.tokens, 3 * options.keep)], options.keep // 2 + 1), 0.01
    if not apart < allowed:
        print(
            f"log-probabilities with the bounded cache differ from the whole history by {apart:.2g}; wanted < {allowed}",
            file=sys.stderr,
        )
        return 1
    console.print(f"with {options.keep} kept keys a head, log-probabilities are {apart:.0e} from those of the whole history")
    written, sizes = write(model, options.prompt.encode(), options.write, options.device)
    console.print(written, markup=False, highlight=False)
    console.print(f"the cache of a layer after {len(written)} bytes: {sizes[1]:,} bytes of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
