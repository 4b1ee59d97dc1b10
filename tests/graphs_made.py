"""CUDA graphs without a GPU: a capture notes each operation with the memory that it read, and a replay runs these operations again.

As with a real graph, a replay reads the memory of the capture, wherever a parameter has gone since.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from saccade.encoders import base
from saccade.integrations.transformers import attention_forward


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    replays = 0  # of all graphs

    def __init__(self):
        self.calls = []

    def replay(self):
        Graph.replays += 1
        with torch.inference_mode(False), torch.no_grad():
            for operation, args, kwargs, before in self.calls:
                for old, new in zip(before, _tensors(operation(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)


def _tensors(found):
    return [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]


class _Capture(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        # of the same memory, which a parameter may leave
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        read = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        written = [None if x.untyped_storage().data_ptr() in read else x.detach() for x in _tensors(found)]
        self.graph.calls.append((operation, args, kwargs, written))
        return found


class _Stream:
    def __init__(self, *given):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass


class _Event:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


class _Generator:
    def graphsafe_set_state(self, state):
        pass


@contextlib.contextmanager
def _nothing(*given, **options):
    yield


def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention of packed tokens whose operations do not depend on lengths, as those of the reference on a CPU do. Padded tokens get the real one."""
    if "cu_seq_lens_q" not in options:
        return attention_forward(module, query, key, value, attention_mask, **options)
    ends, rows = options["cu_seq_lens_q"], torch.arange(query.shape[2])
    sequence = torch.bucketize(rows, ends[1:], right=True)
    seen = sequence[:, None] == sequence[None, :]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=options.get("scaling"))
    return out.transpose(1, 2), None


def install(monkeypatch):
    """Let optimised models of this process capture graphs on the CPU."""
    stream = _Stream()
    cuda = {
        "CUDAGraph": Graph,
        "Stream": _Stream,
        "Event": _Event,
        "graph": lambda graph, **options: _Capture(graph),
        "stream": _nothing,
        "current_stream": lambda device=None: stream,
        "graph_pool_handle": lambda: (0, 0),
        "mem_get_info": lambda device=None: (2**30, 2**30),
        "memory_reserved": lambda device=None: 0,
        "get_rng_state": lambda device=None: None,
        "set_rng_state": lambda state, device=None: None,
        "set_stream": lambda stream: None,
        "default_generators": [_Generator()],
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(base, "has_graphs", lambda device: device.type == "cpu")
