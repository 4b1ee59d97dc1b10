"""Trains a language model with dynamic masks on a sequence that is sharded over ranks, its parameters sharded by FSDP2.

    torchrun --nproc_per_node=2 examples/train_context_parallel.py [--tokens 4096] [--keep 64] [--steps 20] [--dtype bf16]

It runs on as many GPUs as there are processes (NCCL), and on CPUs (gloo). Two machines, each with its own torchrun:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 examples/train_context_parallel.py

The text is Python's own documentation, the topics of `help()`, byte by byte; each topic is a document, and documents cross ranks.
Every rank holds `tokens / context` consecutive tokens of a sequence. Over the sequence a layer exchanges data only in
`saccade.distributed.dynamic_mask_attention`: the best `keep` keys of each rank. The last line has the tokens per second of all ranks.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import saccade.distributed

VOCABULARY = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stretch(NamedTuple):
    """The part of a batch that a rank holds, each `[B, n]`: tokens, the tokens after them, their documents and their positions."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor


class Layer(nn.Module):
    """Pre-norm attention with dynamic masks over the whole sequence, then a feed-forward of the rank's own tokens."""

    def __init__(self, width: int, heads: int, kv_heads: int, keep: int, group) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.keep, self.group = heads, kv_heads, keep, group
        dim = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * dim, bias=False)
        self.score = nn.Linear(width, kv_heads)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, documents: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, tokens, _ = x.shape
        hidden = self.norm1(x)
        rows = self.qkv(hidden).view(batch, tokens, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        query, key, value = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        attended = saccade.distributed.dynamic_mask_attention(
            rotate(query, *rotation), rotate(key, *rotation), value, self.score(hidden).transpose(1, 2).float(), keep=self.keep,
            document_ids=documents, enable_gqa=True, group=self.group,
        )  # fmt: skip
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, keep: int, group=None, recompute: bool = True) -> None:
        super().__init__()
        self.dim, self.recompute = width // heads, recompute
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, keep, group) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        x, rotation = self.embedding(tokens), rotation_of(positions, self.dim)
        for layer in self.layers:
            # in backward every rank computes a layer again, so the ranks exchange their keys again, in the same order
            x = (
                checkpoint(layer, x, documents, rotation, use_reentrant=False)
                if self.recompute
                else layer(x, documents, rotation)
            )
        return self.head(self.norm(x))


def rotation_of(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of rotary embedding, `[B, 1, n, dim]`, at positions of the whole sequence."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=positions.device) / dim)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, H, n, dim]`, pairing the two halves of dim."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def corpus(least: int = 0) -> tuple[Tensor, Tensor]:
    """(bytes, documents), int64 `[n]`: the topics of `help()` one behind another, and again until there are `least` bytes."""
    topics = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
    topics *= max(1, -(-least // sum(len(text) for text in topics)))
    numbers = torch.repeat_interleave(torch.arange(len(topics)), torch.tensor([len(text) for text in topics]))
    return torch.frombuffer(bytearray(b"".join(topics)), dtype=torch.uint8).to(torch.int64), numbers


def stretch(text: tuple[Tensor, Tensor], start: int, tokens: int, rank: int, ranks: int, device: torch.device) -> Stretch:
    """The part of a rank of the sequence of `tokens` bytes that begins at `start`; what is too near the end begins again at the front."""
    bytes_, documents = text
    each = tokens // ranks
    begin = start % (len(bytes_) - tokens) + rank * each
    part = slice(begin, begin + each)
    positions = torch.arange(rank * each, (rank + 1) * each)
    found = (bytes_[part], bytes_[begin + 1 : begin + each + 1], documents[part], positions)
    return Stretch(*(x[None].to(device) for x in found))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of a sequence, over all ranks that share it")
    parser.add_argument("--keep", type=int, default=64, help="keys that each query keeps")
    parser.add_argument("--context", type=int, default=0, help="ranks that share a sequence; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of layers; parameters are kept and summed in fp32")
    return parser.parse_args(argv)


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """The loss of each step, over all tokens of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = options.context or ranks
    # the ranks of a row share a sequence; parameters are sharded over all of them
    sequences = init_device_mesh(device.type, (ranks // context, context), mesh_dim_names=("data", "context"))
    everyone = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)  # the same parameters on every rank, before they are sharded
    model = LanguageModel(options.layers, options.width, options.heads, options.kv_heads, options.keep, sequences["context"])
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[options.dtype], reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    text, losses, seconds = corpus(2 * options.tokens), [], []
    for step in range(options.steps):
        began = time.perf_counter()
        start = (step * (ranks // context) + rank // context) * options.tokens
        part = stretch(text, start, options.tokens, rank % context, context, device)
        logits = model(part.tokens, part.documents, part.positions)
        # FSDP averages gradients over ranks, which have equally many tokens
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  {seconds[-1]:.2f} s", flush=True)
    if rank == 0 and len(seconds) > 1:
        # the first step may compile
        speed = options.tokens * (ranks // context) / statistics.median(seconds[1:])
        print(f"{speed:,.0f} tokens per second on {ranks} ranks, the median of the steps after the first", flush=True)
    return losses


def main(argv: list[str] | None = None) -> int:
    """Train, as one rank of a group."""
    options = arguments(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if not ranks:
        print("start it with torchrun --nproc_per_node=N", file=sys.stderr)
        return 2
    context = options.context or ranks
    if ranks % context or options.tokens % context:
        print(
            f"--context {context} must divide the number of processes, {ranks}, and --tokens, {options.tokens}", file=sys.stderr
        )
        return 2
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
