"""The prepared call of `dynamic_mask_attention`: how it is found, and how it is described the first time."""

from __future__ import annotations

from saccade.dynamic_mask.args import DynamicMaskCall
from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.problem import describe_dynamic_mask
from saccade.engine.calls import gradient_needed
from saccade.engine.prepare import Prepared, finder, prepare

_find = finder("dynamic_mask_attention", DynamicMaskCall)


def prepare_dynamic_mask(call: tuple) -> Prepared:
    """The prepared call of `dynamic_mask_attention`. call: in the order of `DynamicMaskCall`."""
    needs_grad = gradient_needed(*call[:4])
    signed, found = _find(call, needs_grad)
    if found is not None:
        return found
    *given, sinks, window, backend = call
    return prepare(signed, describe_dynamic_mask, (*given, needs_grad, sinks, window), BACKENDS, backend)
