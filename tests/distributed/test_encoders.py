"""Gradients of an optimised encoder on two ranks, averaged and sharded, against those of stock in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import saccade

# the number of real tokens of each row; every rank takes half of the rows
LENGTHS = (7, 1, 12, 5)
LIMITS = {"cpu": 1e-9, "cuda": 1e-6}


def _made(device):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=80, max_position_embeddings=40,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).to(device, torch.float64)


def _batch(device):
    lengths = torch.tensor(LENGTHS, device=device)
    mask = (torch.arange(12, device=device) < lengths[:, None]).long()
    ids = torch.randint(3, 80, mask.shape, generator=torch.Generator().manual_seed(1)).to(device) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(LENGTHS), device=device) % 3}


def gradients(rank, ranks, device, how, first):
    """The largest difference of gradients, and what was said of the last call. first: `optimize` comes before the wrapper."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    stock, model, batch = _made(device), _made(device), _batch(device)
    handle = saccade.optimize(model) if first else None
    inner = model
    if how == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (ranks,))
        if how == "FSDP2 of layers":
            for layer in model.bert.encoder.layer:
                fully_shard(layer, mesh=mesh)
        if how == "FSDP2 of the base":
            fully_shard(model.bert, mesh=mesh)
        fully_shard(model, mesh=mesh)
    handle = handle or saccade.optimize(inner)
    half = len(LENGTHS) // ranks
    worst = 0.0
    for _ in range(2):
        for one, part in ((stock, batch), (model, {name: x[rank * half : (rank + 1) * half] for name, x in batch.items()})):
            one.zero_grad()
            one(**part).loss.backward()
        for x, y in zip(inner.parameters(), stock.parameters(), strict=True):
            got = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
            worst = max(worst, (got - y.grad).abs().max().item())
    dist.barrier()
    return worst, handle.served[0].last, handle.served[0].state.watched


@pytest.mark.parametrize("first", [True, False], ids=["optimised first", "wrapped first"])
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "FSDP2 of the base", "FSDP2 of layers"])
def test_gradients_are_those_of_stock(two, how, first):
    pytest.importorskip("transformers")
    for worst, last, watched in two(gradients, how, first):
        assert worst < LIMITS[two.device_type]
        assert "unpadded" in last or (how == "DDP" and "captured" in last)
        # parameters are gathered around a call, so a graph would read memory that is no longer theirs
        assert bool(watched) == (how != "DDP")
