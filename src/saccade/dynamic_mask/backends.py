"""The backends of `dynamic_mask_attention`: the most specific first, the reference last; and the backends that decode."""

from saccade.dynamic_mask.decode.backend import DECODE
from saccade.dynamic_mask.gather.backend import GATHER, GATHER_CPP, GATHER_TORCH
from saccade.dynamic_mask.reference import REFERENCE
from saccade.engine.backend import Backend

BACKENDS: tuple[Backend, ...] = (GATHER, GATHER_CPP, GATHER_TORCH, REFERENCE)
# `DynamicMaskCache` tries these first, and otherwise attends over its entries with one of the backends above
DECODING: tuple[Backend, ...] = (DECODE,)
