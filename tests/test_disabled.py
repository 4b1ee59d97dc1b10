"""`saccade.disabled()` and `SACCADE_DISABLE=1`: no kernel of ours runs, and afterwards all is as before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from encoders_made import made, padded

import saccade
from saccade import env
from saccade.cli.explain import DescribedCall, answer
from saccade.cli.info import backends_on
from saccade.engine import prepare
from saccade.engine.switch import REASON, is_disabled
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention
from saccade.integrations import sdpa
from saccade.operations import OPERATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs():
    torch.manual_seed(0)
    return [torch.randn(1, 2, 9, 16, device=DEVICE) for _ in range(3)]


def test_a_backend_of_ours_is_refused_by_name_after_it_has_run():
    query, key, value = inputs()
    before = saccade.attention(query, key, value, backend="short")
    with saccade.disabled():
        assert is_disabled()
        with pytest.raises(saccade.UnsupportedProblem, match="saccade is disabled"):
            saccade.attention(query, key, value, backend="short")
        with saccade.disabled():
            torch.testing.assert_close(saccade.attention(query, key, value), F.scaled_dot_product_attention(query, key, value))
        assert is_disabled()
    assert not is_disabled()
    assert torch.equal(saccade.attention(query, key, value, backend="short"), before)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_auto_takes_torchs_kernels_or_the_reference(operation):
    keep = {"keep": 16} if operation == "dynamic_mask_attention" else {}
    call = DescribedCall(operation, 64, 8, 8, 64, 64, needs_grad=True, **keep)
    with saccade.disabled():
        (chosen,) = [line for line in answer(call, None, 90).splitlines() if "->" in line]
        assert chosen.split()[1].rstrip(":") in ("sdpa", "flash", "gather_torch", "reference")
        assert REASON in answer(call, None, 90)
    assert REASON not in answer(call, None, 90)


def test_info_says_so():
    with saccade.disabled():
        found = backends_on(torch.device("cpu"))["dynamic_mask_attention"]
    assert found["gather_cpp"] == [REASON]
    assert found["gather_torch"] == found["reference"] == []


def test_dynamic_masks_and_their_decoding(monkeypatch):
    query, key, value = inputs()
    scores = torch.randn(1, 2, 9, device=DEVICE)
    expected = saccade.dynamic_mask_attention(query, key, value, scores, keep=4, backend="reference")
    with saccade.disabled():
        torch.testing.assert_close(saccade.dynamic_mask_attention(query, key, value, scores, keep=4), expected)
        found = saccade.expiry(scores, keep=4)
    for x, y in zip(found, saccade.expiry(scores, keep=4), strict=True):
        assert torch.equal(x, y)


def test_a_replaced_function_passes_to_torchs(monkeypatch):
    monkeypatch.setattr(sdpa, "attention", lambda *given, **options: pytest.fail("ours ran"))
    query, key, value = inputs()
    expected = F.scaled_dot_product_attention(query, key, value)
    with saccade.replace_sdpa(), saccade.disabled():
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)


def test_an_optimised_encoder_is_stock():
    ours, theirs = made("bert")
    with saccade.optimize(ours.eval()) as handle:
        batch = padded((5, 9), 0, "right", width=9)
        with saccade.disabled():
            torch.testing.assert_close(ours(*batch)[0], theirs.eval()(*batch)[0])
            assert handle.served[0].last == f"stock: {REASON}"
        ours(*batch)
        assert not handle.served[0].last.startswith("stock")


def test_blocks_of_several_threads_overlap():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with saccade.disabled():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    with saccade.disabled():
        pass
    assert is_disabled()
    leave.set()
    thread.join()
    assert not is_disabled()


@pytest.mark.parametrize(
    ("name", "read", "default"),
    [("SACCADE_DISABLE", env.disabled, False), ("SACCADE_NATIVE", env.native_wanted, True),
     ("SACCADE_PRINT_CONFIG", env.print_config, False), ("SACCADE_CHECK_LENGTHS", env.check_lengths, False)],
)  # fmt: skip
def test_a_switch_of_another_value_is_not_ignored_silently(name, read, default, monkeypatch):
    for value, on in (("1", True), ("0", False), ("", default)):
        monkeypatch.setenv(name, value)
        assert read() is on
    monkeypatch.setenv(name, "yes")
    with pytest.warns(UserWarning, match=f"{name} is 'yes'; allowed are 0 and 1"):
        assert read() is default


def test_for_a_whole_process():
    program = "from saccade.engine.switch import is_disabled; assert is_disabled()"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "SACCADE_DISABLE": "1"})


@pytest.mark.parametrize("changed", [False, True])
def test_a_call_during_which_the_library_is_disabled_is_not_remembered(changed):
    """Another thread may enter the block while a call chooses its backend."""
    rows, signature = torch.randn(1, 2, 4, 8), ("a call", changed)

    def describe():
        if changed:
            prepare.forget()
        return describe_attention(rows, rows, rows, None, 0.0, False, None, False, None, False, False, False)

    found = prepare.prepare(signature, describe, (), BACKENDS, "reference")
    assert (prepare._PREPARED.get(signature) is found) == (not changed)
    prepare.forget()
