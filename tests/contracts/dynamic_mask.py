"""What the tests of the kernels of sm_90a share: a plain case, and whether the kernel ran it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade.kernels.dynamic_mask import hopper_causal
from saccade.kernels.launch_cache import LaunchCache
from saccade.testing import DYNAMIC_MASK

# fifteen blocks of forward, eleven of backward; two tiles and a part, or three
PLAIN = replace(DYNAMIC_MASK[0], name="plain", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=700, head_dim=128, keep=100)


class Forgetful(LaunchCache):
    """So that the kernel is asked at each call."""

    def remember(self, key, value):
        """Only return it."""
        return value


def watch_takes(monkeypatch, native) -> list[bool]:
    """What the kernel of a module was asked to run, True for what it did."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 device")
    answers: list[bool] = []
    takes = native.takes
    monkeypatch.setattr(hopper_causal, "_PLANNED", Forgetful())
    monkeypatch.setattr(native, "takes", lambda *tensors: answers.append(takes(*tensors)) or answers[-1])
    return answers
