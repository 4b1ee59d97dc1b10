"""The tests from which backends are excused in the contracts that they inherit, each with its reason. Nothing else may excuse a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HALF_ONLY = "it computes in float16 alone and the test compares at the tolerances of float32; `test_budget` has these cases"


class OptOut(NamedTuple):
    """A value of a contract's attribute, or None in place of a test, and why."""

    value: Any
    reason: str


# class of tests -> attribute or test of its contract -> what stands in its place
OPT_OUTS: dict[str, dict[str, OptOut]] = {
    "exact/test_short.py::TestShort": {
        "skipped_tags": OptOut(("fallback",), "its rows have at most 128 keys"),
        "dtypes_in_turn": OptOut(True, "its own tests run every configuration in both dtypes, and the interpreter is slow"),
    },
    "exact/test_ragged.py::TestRagged": {
        "clears_masked": OptOut(False, "hidden keys are multiplied by weights of 0, as in torch"),
        "cross_section": OptOut(True, "its own tests have the other shapes, and the interpreter is slow"),
        "test_backward_needs_no_memory_beyond_its_results": OptOut(
            None, "its backward holds delta, a number for each query, and two more where there is a bias"
        ),
    },
    "exact/test_shared_bias.py::TestSharedBias": {
        "clears_masked": OptOut(False, "hidden keys are multiplied by weights of 0, as in torch"),
        "test_causal_is_upper_left": OptOut(None, "attn_mask excludes is_causal, and it takes calls with a bias alone"),
        "test_backward_needs_no_memory_beyond_its_results": OptOut(
            None, "its backward holds three numbers for each query, and the sums of the gradient of the bias"
        ),
    },
    "exact/test_reference.py::TestReference": {
        "keeps_layout": OptOut(False, "torch's operations choose the layout"),
        "large_bytes": OptOut(250e9, "it forms every score several times, more than one device holds"),
    },
    "exact/test_sdpa.py::TestSdpa": {
        "has_lse": OptOut(False, "torch's function has no log-sum-exp; TestSdpaWithLse tests our wrapper, which has one"),
        "own_dropout": OptOut(False, "torch draws its own dropout"),
        "clears_masked": OptOut(False, "torch multiplies hidden keys by weights of 0"),
        "keeps_layout": OptOut(False, "torch chooses the layout"),
        "same_bits": OptOut(False, "torch picks another kernel for another layout"),
        "only_rounding": OptOut(("bias-queries",), "torch adds up rounded dS, of which a bias constant over the keys keeps rounding alone"),
        "slack": OptOut(2.0, "torch's fused kernels round dS before they sum dbias, 1.11 times our budget"),
        "test_offsets_beyond_int32": OptOut(None, "torch 2.11 itself gives a wrong dq beyond 2^31 elements on an H200"),
    },
    "exact/test_sdpa.py::TestSdpaWithLse": {
        "has_lse": OptOut(True, "our wrapper returns it"),
        "slack": OptOut(1.0, "backward is ours"),
        "test_more_problems_than_65535": OptOut(None, "it needs a GPU, on which torch's function gives no log-sum-exp"),
    },
    "exact/test_volta.py::TestVolta": {
        "large_bytes": OptOut(75e9, "its backward sums dQ in float32, which takes more memory"),
        "test_grouped_heads_are_repeated_heads": OptOut(None, HALF_ONLY),
        "test_scale_is_a_factor_on_the_scores": OptOut(None, HALF_ONLY),
        "test_causal_is_upper_left": OptOut(None, HALF_ONLY),
        "test_lse_has_its_own_gradient": OptOut(None, HALF_ONLY),
        "test_empty": OptOut(None, HALF_ONLY),
        "test_backward_needs_no_memory_beyond_its_results": OptOut(
            None, "dQ is summed in float32, 4 B * H * Tq * D bytes, and out is saved for delta"
        ),
    },
    "exact/test_varlen.py::TestSdpa": {
        "has_lse": OptOut(False, "torch's function has no log-sum-exp"),
        "own_dropout": OptOut(False, "torch draws its own dropout"),
    },
    "exact/test_varlen.py::TestFlash": {
        "has_lse": OptOut(False, "the log-sum-exp of torch's packed attention has no gradient"),
        "own_dropout": OptOut(False, "torch draws its own dropout"),
        "takes_bias": OptOut(False, "torch's packed attention takes no bias"),
        "dtypes": OptOut((torch.bfloat16, torch.float16), "torch's packed attention takes no float32"),
    },
    "nm_sparse/test_fused.py::TestMmaSp": {"dtype": OptOut(torch.bfloat16, "sparse tensor cores take 16-bit numbers first of all")},
    "nm_sparse/test_fused_sm80.py::TestSm80": {"dtype": OptOut(torch.bfloat16, "sparse tensor cores take 16-bit numbers first of all")},
    "dynamic_mask/test_gather.py::TestReference": {
        "keeps_layout": OptOut(False, "torch's operations choose the layout"),
    },
}  # fmt: skip


def opted_out(name: str) -> Callable[[type], type]:
    """A decorator that puts a class's opt-outs, `OPT_OUTS[name]`, into it."""

    def apply(tests: type) -> type:
        for attribute, (value, _) in OPT_OUTS[name].items():
            if not hasattr(tests, attribute):
                raise AttributeError(f"{name} opts out of {attribute}, which its contract has not")
            setattr(tests, attribute, value)
        return tests

    return apply
