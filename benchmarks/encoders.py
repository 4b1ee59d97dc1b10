"""Encoders of transformers for tables of whole models: random weights of the real configurations, and batches for them.

Scores of freshly made encoders are all nearly 0, so that every key weighs the same and a wrong mask would hardly show. The weights
of queries and keys are therefore drawn so large that scores have a standard deviation of about 1. Times do not depend on that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.testing.timing import Timing

CLASSES = 10  # of the linear head of a training step
_LARGER = ("query", "key", "q_proj", "k_proj")
_BASE = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}


@dataclass(frozen=True)
class Architecture:
    """One encoder: its class in transformers without "Config" and "Model", and its sizes. pool: "mean" over the tokens, or "first". part: that of the
    class which is the encoder."""

    name: str
    kind: str
    sizes: dict[str, Any]
    pool: str = "first"
    options: dict[str, Any] = field(default_factory=dict)
    part: str = ""

    @property
    def is_text(self) -> bool:
        """Whether it reads tokens; else it reads images."""
        return self.packs or self.kind == "T5"

    @property
    def packs(self) -> bool:
        """Whether it takes a packed batch. T5's relative bias is of padded positions."""
        return self.kind in ("Bert", "XLMRoberta", "ModernBert")

    @property
    def tokens(self) -> int:
        """Tokens of an image: patches, and a class token where the model has one."""
        return (self.sizes["image_size"] // self.sizes["patch_size"]) ** 2 + (self.pool == "first")

    def make(self, device: str, dtype: torch.dtype) -> Encoder:
        """The encoder with random weights, the same for each call."""
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(**self.sizes)
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(transformers, f"{self.kind}{self.part}Model")._from_config(
                config, attn_implementation="sdpa", **self.options
            )
            found = Encoder(model, config.hidden_size, self.pool)
        with torch.no_grad():
            for name, weight in found.model.named_parameters():
                if weight.dim() == 2 and any(part in name for part in _LARGER):
                    weight.normal_(std=weight.shape[1] ** -0.5)
        return found.to(dtype).eval()


MINILM = Architecture(
    "MiniLM", "Bert", {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}, "mean",
    {"add_pooling_layer": False},
)  # fmt: skip
BERT = Architecture("BERT-base", "Bert", _BASE, "first", {"add_pooling_layer": False})
XLMR = Architecture(
    "XLM-R-base", "XLMRoberta", {**_BASE, "vocab_size": 30522, "pad_token_id": 0, "max_position_embeddings": 514}, "mean", {"add_pooling_layer": False},
)  # fmt: skip
# its own 22 layers, windows of +-64 in two of three, and rotary positions
MODERN = Architecture(
    "ModernBERT-base", "ModernBert",
    {"vocab_size": 30522, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}, "mean",
)  # fmt: skip
T5 = Architecture("T5-base encoder", "T5", {**_BASE, "d_ff": 3072}, "mean", part="Encoder")
_IMAGE = {"image_size": 224, "patch_size": 16}
VIT = Architecture("ViT-B/16", "ViT", {**_BASE, **_IMAGE}, "first", {"add_pooling_layer": False})
CLIP = Architecture("CLIP ViT-L/14", "CLIPVision", {**_LARGE, "intermediate_size": 4096, "image_size": 224, "patch_size": 14})
CLIP_B = Architecture("CLIP-B/32", "CLIPVision", {**_BASE, "image_size": 224, "patch_size": 32})
SIGLIP = Architecture("SigLIP-B/16", "SiglipVision", {**_BASE, **_IMAGE, "vision_use_head": False}, "mean")
DINO = Architecture("DINOv2-L/14", "Dinov2", {**_LARGE, "image_size": 224, "patch_size": 14})


class Encoder(nn.Module):
    """A model of transformers, the pooled vector of each item, and a linear head for training."""

    def __init__(self, model: nn.Module, width: int, pool: str) -> None:
        super().__init__()
        self.model, self.head, self.pool = model, nn.Linear(width, CLASSES), pool

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """`[B, E]` float32 (or float64) of padded or packed inputs."""
        hidden = self.model(**inputs).last_hidden_state
        hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
        ends = inputs.get("cu_seq_lens_q")
        if self.pool == "first":
            return hidden[:, 0] if ends is None else hidden[0].index_select(0, ends[:-1])
        if ends is not None:
            return torch.segment_reduce(hidden[0], "mean", lengths=ends.diff().long())
        if "attention_mask" not in inputs:
            return hidden.mean(1)
        real = inputs["attention_mask"].unsqueeze(-1)
        return (hidden * real).sum(1) / real.sum(1)

    def loss(self, inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Cross entropy of the head over the vectors."""
        return F.cross_entropy(self.head(self(inputs).to(self.head.weight.dtype)).float(), labels)

    def under(self, attention: str) -> Encoder:
        """A copy whose layers call the attention registered under this name."""
        other = copy.deepcopy(self)
        other.model.set_attn_implementation(attention)
        return other


@dataclass(frozen=True)
class Batch:
    """The items of one call on the device, padded and, of text, packed without padding too; `labels` are drawn."""

    padded: dict[str, Any]
    packed: dict[str, Any] | None
    labels: Tensor

    def part(self, start: int, stop: int) -> dict[str, Any]:
        """Padded inputs of some of the items."""
        return {name: x[start:stop] for name, x in self.padded.items()}


def text_batch(rows: list[Tensor], device: str, width: int | None = None) -> Batch:
    """Rows of token ids, padded to the longest or to `width`, and packed into one row."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ids = F.pad(ids, (0, (width or longest) - longest))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    ends = F.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    places = torch.cat([torch.arange(len(row)) for row in rows])
    packed = {
        "input_ids": torch.cat(rows)[None].to(device), "position_ids": places[None].to(device), "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
    return Batch({"input_ids": ids.to(device), "attention_mask": mask.to(device)}, packed, _labels(len(rows), device))


def image_batch(size: int, count: int, device: str, dtype: torch.dtype) -> Batch:
    """Images of random numbers."""
    pixels = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    return Batch({"pixel_values": pixels.to(device, dtype)}, None, _labels(count, device))


def _labels(count: int, device: str) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(1)).to(device)


def training_step(encoder: Encoder, inputs: dict[str, Any], labels: Tensor) -> Callable[[], None]:
    """A step of training with dropout as configured: forward, backward, fused AdamW."""
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)
    encoder.train()

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        encoder.loss(inputs, labels).backward()
        optimiser.step()

    return step


def compared(times: Mapping[str, Timing]) -> str:
    """The time of each implementation, and how many times as fast as stock it is."""
    stock = times.get("stock")
    gains = {name: f" (x{stock.p50 / timing.p50:.2f})" for name, timing in times.items() if stock and name != "stock"}
    return ", ".join(f"{name} {timing.p50:.2f} ms{gains.get(name, '')}" for name, timing in times.items())
