"""The ops and autograd.Functions of `attention`, declared from its record."""

from __future__ import annotations

from saccade.engine.flops import pairs_of
from saccade.engine.layout import HEADS
from saccade.engine.op_replay import OpReplay, same_layouts
from saccade.exact.args import AttentionArgs
from saccade.exact.backends import BACKENDS
from saccade.exact.ops import Ops
from saccade.exact.reference import attend

_FORWARD = OpReplay(lambda given: (*given, "forward"), same_layouts)
_BACKWARD = OpReplay(lambda given: (*given, "backward"), same_layouts)

OPS = Ops(
    "attention", ("Attention", "AttentionPacked"), AttentionArgs, BACKENDS, HEADS,
    attend=attend, pairs=lambda args: pairs_of(args.query, args.key), shapes=lambda args: (args.query, args.key),
    replays=(_FORWARD, _BACKWARD), needs_out=False,
)  # fmt: skip
