"""A plugin of pytest for `peers.py`: puts functions of this package in place of another project's before its tests are collected, and writes the
outcome of every test to a file as soon as it is known, so that a process that dies has told what it ran."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import random
import sys
import types
import zlib
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import pytest

_REFUSED = "saccade refuses: "
# name of a function that has lists of values -> one of how many of its tests is still to be kept
_LEFT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that `peers.py` gives."""
    parser.addoption("--peers-adapter", default="none", choices=("none", *ADAPTERS))
    parser.addoption("--peers-log")
    parser.addoption("--peers-every", type=int, default=1)
    parser.addoption("--peers-names")


def pytest_configure(config: pytest.Config) -> None:
    """Put our functions in place."""
    config.stash[_LEFT] = {}
    adapter = config.getoption("--peers-adapter")
    if adapter != "none":
        ADAPTERS[adapter]()
    if config.getoption("--peers-log") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(Path(config.getoption("--peers-log"))))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave most tests of a function out before they are made: those of flash-attention are the product of a dozen lists, and making all takes
    minutes. After each list as many stay as there shall be in the end, whatever their values."""
    every, name = metafunc.config.getoption("--peers-every"), metafunc.definition.nodeid
    lists = [mark.args[1] for mark in metafunc.definition.iter_markers("parametrize") if len(mark.args) > 1]
    total = math.prod(len(values) for values in lists if isinstance(values, Sized))
    if every == 1 or total <= 1:
        return
    kept, parametrize, chance = max(1, total // every), metafunc.parametrize, random.Random(name)
    metafunc.config.stash[_LEFT][name] = max(1, every // total)

    def parametrized(*args: Any, **options: Any) -> None:
        parametrize(*args, **options)
        made = metafunc._calls
        if len(made) > kept:
            metafunc._calls = [made[i] for i in sorted(chance.sample(range(len(made)), kept))]

    metafunc.parametrize = parametrized


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of so many, the same ones in every process and run, and of these the named ones."""
    every, left = config.getoption("--peers-every"), config.stash[_LEFT]
    items[:] = [i for i in items if zlib.crc32(i.nodeid.encode()) % left.get(i.nodeid.partition("[")[0], every) == 0]
    if path := config.getoption("--peers-names"):
        names = set(json.loads(Path(path).read_text(encoding="utf-8")))
        items[:] = [item for item in items if item.nodeid in names]
    if config.getoption("--peers-adapter") == "flash_attn":
        for module in {item.module for item in items if isinstance(item, pytest.Function)}:
            _leave_weights_normalized(module)


def _leave_weights_normalized(module: types.ModuleType) -> None:
    """flash_attn gives weights that are scaled by the largest score of each block of keys, and its tests undo that; ours are told as they are."""
    if hasattr(module, "normalize_flash_attn_S"):
        module.normalize_flash_attn_S = lambda weights, *rest, **options: weights


class _Log:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome: str = report.outcome
            if report.skipped and isinstance(report.longrepr, tuple) and _REFUSED in report.longrepr[2]:
                outcome = "refused"
            self._tell(report.nodeid, outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(f"{report.nodeid} (collecting)", "failed")

    def _tell(self, name: str, outcome: str) -> None:
        self._file.write(json.dumps([name, outcome]) + "\n")
        self._file.flush()


def _skips_refusals(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test of what this package refuses in a sentence (ALiBi, soft caps) is skipped and counted as refused, not failed."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        from saccade.errors import InvalidArgument, UnsupportedProblem

        try:
            return function(*args, **options)
        except (InvalidArgument, UnsupportedProblem) as error:
            pytest.skip(_REFUSED + str(error))

    return called


# --- torch's function


def sdpa() -> None:
    """`saccade.replace_sdpa`."""
    import saccade

    saccade.replace_sdpa()


# --- flash-attention


def flash_attn() -> None:
    """The functions of `saccade.flash_attn_interface` by their names in the package flash_attn, whose other modules its tests import."""
    try:
        importlib.import_module("flash_attn_2_cuda")
    except ImportError:  # not compiled here; nothing of it is called
        sys.modules["flash_attn_2_cuda"] = types.ModuleType("flash_attn_2_cuda")
    package, interface = (importlib.import_module(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    for name, function in flash_attn_functions().items():
        for module in (package, interface):
            setattr(module, name, function)


def flash_attn_functions() -> dict[str, Callable[..., Any]]:
    """Ours by the names of flash_attn 2. Its tests take the weights and the draw of dropout from `return_attn_probs`, which ours do not give."""
    import saccade.flash_attn_interface as ours

    func, varlen = _telling(ours.flash_attn_func, _dense_weights), _telling(ours.flash_attn_varlen_func, _packed_weights)

    def qkvpacked(qkv, *rest, **options):
        return func(*qkv.unbind(2), *rest, **options)

    def kvpacked(q, kv, *rest, **options):
        return func(q, *kv.unbind(2), *rest, **options)

    def varlen_qkvpacked(qkv, cu_seqlens, max_seqlen, *rest, **options):
        return varlen(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest, **options)

    def varlen_kvpacked(q, kv, *rest, **options):
        return varlen(q, *kv.unbind(1), *rest, **options)

    def with_kvcache(*given, **options):
        raise ours.InvalidArgument("saccade has no function for caches of keys and values as flash_attn lays them out")

    found = {
        "flash_attn_func": func, "flash_attn_varlen_func": varlen, "flash_attn_qkvpacked_func": qkvpacked, "flash_attn_kvpacked_func": kvpacked,
        "flash_attn_varlen_qkvpacked_func": varlen_qkvpacked, "flash_attn_varlen_kvpacked_func": varlen_kvpacked,
        "flash_attn_with_kvcache": with_kvcache,
    }  # fmt: skip
    return {name: _skips_refusals(function) for name, function in found.items()}


def _telling(function: Callable[..., Any], weights: Callable[[dict[str, Any], Any], Any]) -> Callable[..., Any]:
    """`function`, which gives under dropout with `return_attn_probs` the weights of attention before dropout, below 0 where one is dropped. weights:
    these of a call and its log-sum-exp. A kernel of ours has to compute the call, whose draw can be repeated: deterministic=True asks for that."""

    def called(*args: Any, **options: Any) -> Any:
        from torch import cuda, default_generator, int64, randint
        from torch.nn.functional import pad

        from saccade.engine.philox import dropout_keep

        call = inspect.signature(function).bind(*args, **options)
        call.apply_defaults()
        a = call.arguments
        if not a["return_attn_probs"] or a["dropout_p"] == 0:
            return function(*args, **options)
        a["deterministic"] = True
        device = a["q"].device
        generator = cuda.default_generators[device.index] if device.type == "cuda" else default_generator
        before = generator.get_state()
        out, lse, _ = function(*call.args, **call.kwargs)
        after = generator.get_state()
        generator.set_state(before)
        key = randint(0, 2**62, (1,), dtype=int64, device=device)  # drawn as the call drew it
        generator.set_state(after)
        found = weights(a, lse.detach())
        found = found.where(dropout_keep(key, a["dropout_p"], *found.shape), -found)
        # flash_attn rounds both lengths up to its largest tile
        return out, lse, pad(found, (0, -found.shape[3] % 128, 0, -found.shape[2] % 128)).to(a["q"].dtype)

    return called


def _dense_weights(a: dict[str, Any], lse: Any) -> Any:
    """The weights of q `[B, Tq, H, D]` and k `[B, Tk, Hkv, D]`, float32 `[B, H, Tq, Tk]`, by the log-sum-exp `[B, H, Tq]` of a kernel.

    So the log-sum-exp is tested. Weights that a causal mask hides are not 0; the tests hide them themselves."""
    q, k = (a[name].detach().transpose(1, 2).float() for name in ("q", "k"))
    scale = q.shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
    return (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale - lse[..., None]).exp()


def _packed_weights(a: dict[str, Any], lse: Any) -> Any:
    """The same of packed tokens, float32 `[N, H, longest q, longest k]`, 0 beyond the end of a sequence."""
    q_ends, k_ends = (a[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    found = lse.new_zeros(len(q_ends) - 1, len(lse), a["max_seqlen_q"], a["max_seqlen_k"])
    for n, there in enumerate(found):
        rows, keys = slice(*q_ends[n : n + 2]), slice(*k_ends[n : n + 2])
        one = {**a, "q": a["q"][None, rows], "k": a["k"][None, keys]}
        there[:, : rows.stop - rows.start, : keys.stop - keys.start] = _dense_weights(one, lse[None, :, rows])[0]
    return found


# --- xformers


def xformers() -> None:
    """`memory_efficient_attention` by `saccade.attention`, without a bias, with a tensor of biases, or causal."""
    modules = [importlib.import_module(name) for name in ("xformers.ops", "xformers.ops.fmha")]
    for module in modules:
        module.memory_efficient_attention = _skips_refusals(memory_efficient_attention)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """xformers' function of tensors `[B, T, H, D]` or `[B, T, D]`; op, which names a kernel of theirs, is of no account."""
    import torch

    import saccade
    from saccade.errors import InvalidArgument

    if query.dim() not in (3, 4):
        raise InvalidArgument(f"query has {query.dim()} dimensions; tensors of 3 or 4 are taken here")
    tensors = [x.unsqueeze(2) if x.dim() == 3 else x for x in (query, key, value)]
    is_causal = type(attn_bias).__name__ == "LowerTriangularMask"
    if not (attn_bias is None or is_causal or type(attn_bias) is torch.Tensor):
        raise InvalidArgument(f"attn_bias is a {type(attn_bias).__name__}, which has no counterpart here")
    bias = None if is_causal or attn_bias is None else attn_bias if attn_bias.dim() == 4 else attn_bias.unsqueeze(1)
    out = saccade.attention(*(x.transpose(1, 2) for x in tensors), bias, p, is_causal, scale).transpose(1, 2)
    out = out if output_dtype is None else out.to(output_dtype)
    return out.squeeze(2) if query.dim() == 3 else out


# --- transformers


def transformers() -> None:
    """Replace the functions that models call under attn_implementation="sdpa"."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from saccade.integrations.transformers import attention_forward, boolean_mask

    ALL_ATTENTION_FUNCTIONS.register("sdpa", _skips_refusals(attention_forward))
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", boolean_mask)


ADAPTERS: dict[str, Callable[[], None]] = {
    "sdpa": sdpa,
    "flash_attn": flash_attn,
    "xformers": xformers,
    "transformers": transformers,
}
