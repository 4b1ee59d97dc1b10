"""The backends of `dynamic_mask_attention`, most specific first, the reference last; and those that decode."""

from saccade.dynamic_mask.decode.backend import DECODE
from saccade.dynamic_mask.gather.backend import GATHER, GATHER_TORCH
from saccade.dynamic_mask.reference import REFERENCE
from saccade.engine.backend import Backend

BACKENDS: tuple[Backend, ...] = (GATHER, GATHER_TORCH, REFERENCE)
# `DynamicMaskCache` asks these first, then attends over its entries by one of the backends above
DECODING: tuple[Backend, ...] = (DECODE,)
