"""Run by a test: `beside.py VARIANT` uses the copy and the installed package in one process."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from loading import load
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.native.build import Build

copy = load(Path(sys.argv[1]))
assert copy.__name__ != "saccade"
q, k, v = torch.randn(3, 2, 4, 9, 16)
scores, ends = torch.randn(2, 4, 9), torch.tensor([0, 4, 18], dtype=torch.int32)


def module(name: str):
    return importlib.import_module(f"{copy.__name__}.{name}")


def calls(package):
    """Every operation once, by reference kernels that go through ops of torch under fake tensors and compilation."""
    packed = [x.transpose(1, 2).reshape(18, 4, 16) for x in (q, k, v)]
    return (
        package.attention(q, k, v, return_lse=True)[1],
        package.nm_sparse_attention(q, k, v[..., :8], pattern="1:2"),
        package.dynamic_mask_attention(q, k, v, scores, keep=4, is_causal=True),
        package.attention_varlen(*packed, ends, ends, 14, 14),
    )


def raised_by(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def ops_are_two():
    ours, theirs = (dir(getattr(torch.ops, name)) for name in ("saccade", copy.__name__))
    assert "attention_forward" in ours
    assert set(ours) - {"name"} == set(theirs) - {"name"}, set(ours) ^ set(theirs)
    for package in (saccade, copy):
        for eager, compiled in zip(
            calls(package), torch.compile(calls, fullgraph=True, backend="aot_eager")(package), strict=True
        ):
            torch.testing.assert_close(eager, compiled)
    for one, other in zip(calls(saccade), calls(copy), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def flops_are_counted_of_both():
    counts = []
    for package in (saccade, copy):
        with FlopCounterMode(display=False) as counter:
            package.nm_sparse_attention(q, k, v, pattern="1:2")
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0, counts


def torch_function_is_replaced_by_one_at_a_time():
    first = F.scaled_dot_product_attention
    with saccade.replace_sdpa():
        installed = F.scaled_dot_product_attention
        with copy.replace_sdpa():
            assert F.scaled_dot_product_attention is not installed
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), first(q, k, v))
        assert F.scaled_dot_product_attention is installed
    assert F.scaled_dot_product_attention is first


def errors_and_modules_are_those_of_the_copy():
    error = raised_by(copy.InvalidArgument, lambda: copy.attention(q, k, v, scale="large"))
    assert not isinstance(error, saccade.InvalidArgument)
    assert isinstance(pickle.loads(pickle.dumps(error)), copy.InvalidArgument)
    layer = pickle.loads(pickle.dumps(copy.nn.EncoderLayer(16, 2)))
    assert type(layer) is copy.nn.EncoderLayer
    saccade.nn.EncoderLayer(16, 2).load_state_dict(layer.state_dict())


def both_compile_their_cpp():
    builds = [Build(), module("native.build").Build()]
    found = [build.wait() for build in builds]
    if None in found:
        print("no C++ here:", *[build.refusal for build in builds])
        return
    memories = [one.Memory() for one in found]
    assert [len(memory) for memory in memories] == [0, 0]
    assert [memory.run(q, k, v) for memory in memories] == [None, None]


def names_in_transformers_are_refused_by_both():
    from transformers import MPNetConfig, MPNetModel

    registered = module("integrations.transformers").register
    saccade.integrations.transformers.register("saccade")
    error = raised_by(copy.InvalidArgument, lambda: registered("saccade"))
    assert "already uses" in str(error), error
    registered("saccade_copy")
    config = MPNetConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    for name in ("saccade", "saccade_copy"):
        # the same wrapper of transformers' method knows the names of both, and raises the error of the one that put it there
        raised_by(saccade.UnsupportedProblem, lambda name=name: MPNetModel._from_config(config, attn_implementation=name))


for check in (
    ops_are_two, flops_are_counted_of_both, torch_function_is_replaced_by_one_at_a_time, errors_and_modules_are_those_of_the_copy,
    both_compile_their_cpp, names_in_transformers_are_refused_by_both,
):  # fmt: skip
    check()
    print("passed:", check.__name__)
