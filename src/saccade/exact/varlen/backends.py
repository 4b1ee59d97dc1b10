"""The backends of `attention_varlen`, most specific first, the reference last."""

from saccade.engine.backend import Backend
from saccade.exact.ragged.backend import RAGGED
from saccade.exact.varlen.by_torch import FLASH, SDPA
from saccade.exact.varlen.reference import REFERENCE

BACKENDS: tuple[Backend, ...] = (RAGGED, FLASH, SDPA, REFERENCE)
