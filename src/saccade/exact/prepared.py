"""The prepared call of `attention`: how it is found, and how it is described the first time."""

from __future__ import annotations

from torch import Tensor

from saccade.engine.calls import gradient_needed
from saccade.engine.kinds import check_kinds
from saccade.engine.prepare import Prepared, finder, prepare
from saccade.engine.problem import compiled_or_captured
from saccade.exact.args import AttentionCall
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention, must_broadcast

_find = finder("attention", AttentionCall)
_WINDOW = AttentionCall._fields.index("window")


def prepare_attention(call: tuple, packed: bool) -> Prepared | None:
    """The prepared call of `attention`, or of `attention_qkvpacked` if `packed`; None if the tensors must be broadcast first.

    call: in the order of `AttentionCall`.
    """
    needs_grad, query = gradient_needed(*call[:4]), call[0]
    signed, found = _find(call, packed, needs_grad, isinstance(query, Tensor) and compiled_or_captured(query))
    if found is not None:
        return found
    given = AttentionCall(*call)
    check_kinds(query=query, key=given.key, value=given.value, attn_mask=given.attn_mask, lengths=given.lengths)
    if must_broadcast(query, given.key, given.value, given.enable_gqa):
        return None
    described = (*call[:_WINDOW], given.return_lse, packed, needs_grad, given.window, given.key_mask)
    return prepare(signed, describe_attention, described, BACKENDS, given.backend)
