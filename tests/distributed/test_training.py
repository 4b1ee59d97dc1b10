"""Gradients of a training step on several ranks against those of one process: an encoder of ragged batches, and a language model
with dynamic masks over a sharded sequence."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import saccade

PATH = Path(__file__).parents[2] / "examples" / "train_context_parallel.py"
LENGTHS = (7, 1, 12, 5, 9, 3, 2, 8)
WIDTH, HEADS = 32, 4
LIMITS = {"cpu": 1e-5, "cuda": 1e-2}  # a GPU multiplies float32 as TF32


def example():
    """The module of the example."""
    if PATH.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
        sys.modules[PATH.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PATH.stem])
    return sys.modules[PATH.stem]


class Block(nn.Module):
    """An encoder layer for packed sequences."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, rows):
        hidden = self.norm(x)
        # the number of heads follows from the weights, which tensor parallelism shards
        query, key, value = (f(hidden).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.query, self.key, self.value))
        x = x + self.out(saccade.attention_varlen(query, key, value, rows, rows, 12, 12).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Encoder(nn.Module):
    """Two layers and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, rows):
        for block in self.blocks:
            x = block(x, rows)
        return self.head(x)


def packed(device, lengths):
    """Offsets of sequences that lie one behind another."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def farthest(model, expected):
    """The largest distance of a gradient from its expected one, over the latter's norm, and the parameter that it is of."""
    # a bias of keys or of scores adds the same to all scores of a query: its gradient is 0 but for rounding
    least = 1e-2 * max(wanted.grad.norm() for wanted in expected.parameters())
    worst = (0.0, "")
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        assert gradient is not None, name
        worst = max(worst, (((gradient - wanted.grad).norm() / torch.maximum(wanted.grad.norm(), least)).item(), name))
    return worst


def _encoder(rank, ranks, device, how):
    torch.manual_seed(0)
    alone = Encoder().to(device)
    model = copy.deepcopy(alone)
    tokens = torch.randn(sum(LENGTHS), WIDTH, device=device)
    alone(tokens, packed(device, LENGTHS)).square().sum().backward()
    mesh = init_device_mesh(device.type, (ranks,))
    if how == "tensor parallel":
        plan = {name: ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")}
        plan |= {"up": ColwiseParallel(), "out": RowwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        seen = []
        model.blocks[0].out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(tokens, packed(device, LENGTHS)).square().sum().backward()
        assert isinstance(seen[0], DTensor), "attention returned a DTensor"
        assert seen[0].placements == (Shard(1),)
        return farthest(model, alone)
    # each rank has sequences of its own; uneven numbers of tokens
    each = len(LENGTHS) // ranks
    begin, lengths = sum(LENGTHS[: rank * each]), LENGTHS[rank * each : (rank + 1) * each]
    own, rows = tokens[begin : begin + sum(lengths)], packed(device, lengths)
    if how == "DDP":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # both average gradients over ranks
    (model(own, rows).square().sum() * ranks).backward()
    return farthest(model, alone)


@pytest.mark.parametrize("how", ["DDP", "FSDP2", "tensor parallel"])
def test_encoder_of_ragged_batches(two, how):
    assert max(two(_encoder, how)) < (LIMITS[two.device_type],)


def test_encoder_on_four_ranks(four):
    assert max(four(_encoder, "FSDP2")) < (LIMITS[four.device_type],)


class _Unlike:
    """Saved-tensor hooks that bring a tensor back with other strides, as those do that pack or move what is saved."""

    @staticmethod
    def pack(x):
        return x

    @staticmethod
    def unpack(x):
        if x.dim() < 2 or x.is_nested:
            return x
        return x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)


def _language_model(rank, ranks, device, how, hooks):
    module = example()
    torch.manual_seed(0)
    options = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "keep": 6, "recompute": hooks == "checkpoint"}
    selves = [dist.new_group([r]) for r in range(ranks)]
    alone = module.LanguageModel(**options, group=selves[rank]).to(device)
    group = dist.new_group()
    model = copy_with_group(alone, module.LanguageModel(**options, group=group).to(device))
    text, tokens = module.corpus(), 64

    def loss(model, part):
        logits = model(part.tokens, part.documents, part.positions)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.targets.flatten())

    start = 2300  # a document ends in the first rank's part
    loss(alone, module.stretch(text, start, tokens, 0, 1, device)).backward()
    mesh = init_device_mesh(device.type, (ranks,))
    if how == "DDP":
        model = DistributedDataParallel(model)
    elif how == "FSDP2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    part = module.stretch(text, start, tokens, rank, ranks, device)
    if hooks == "offload":
        with torch.autograd.graph.save_on_cpu():
            found = loss(model, part)
    elif hooks == "other strides":
        with torch.autograd.graph.saved_tensors_hooks(_Unlike.pack, _Unlike.unpack):
            found = loss(model, part)
    else:
        found = loss(model, part)
    found.backward()
    return farthest(model, alone)


def copy_with_group(source, target):
    """The parameters of one model in another."""
    target.load_state_dict(source.state_dict())
    return target


@pytest.mark.parametrize(
    ("how", "hooks"), [("DDP", ""), ("FSDP2", "checkpoint"), ("DDP", "offload"), ("FSDP2", "offload"), ("DDP", "other strides")]
)
def test_language_model_over_a_sharded_sequence(two, how, hooks):
    assert max(two(_language_model, how, hooks)) < (LIMITS[two.device_type],)


def test_language_model_on_many_ranks(many):
    assert max(many(_language_model, "FSDP2", "checkpoint")) < (LIMITS[many.device_type],)


def _tensor_parallel_layer(rank, ranks, device):
    """Dynamic masks with query and key heads sharded over ranks, as tensor parallelism does."""
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)
    layer = nn.ModuleDict({"qkv": nn.ModuleDict({n: nn.Linear(32, w) for n, w in (("q", 32), ("k", 16), ("v", 16), ("s", 2))})})
    layer["out"] = nn.Linear(32, 32)
    layer = layer.to(device)
    alone, x = copy.deepcopy(layer), torch.randn(2, 20, 32, device=device)

    def run(layer):
        query, key, value = (layer["qkv"][n](x).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv")
        scores = layer["qkv"]["s"](x).transpose(1, 2)
        out = saccade.dynamic_mask_attention(query, key, value, scores, keep=5, enable_gqa=True)
        return layer["out"](out.transpose(1, 2).flatten(2)).square().sum()

    run(alone).backward()
    parallelize_module(layer["qkv"], mesh, {n: ColwiseParallel(use_local_output=False) for n in "qkvs"})
    parallelize_module(layer["out"], mesh, RowwiseParallel())
    run(layer).backward()
    return farthest(layer, alone)


def test_tensor_parallel_dynamic_masks(two):
    assert max(two(_tensor_parallel_layer)) < (LIMITS[two.device_type],)
