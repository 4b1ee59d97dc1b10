"""The backends of `attention`: the most specific first (`long` says itself where `short` is faster), the reference last."""

from saccade.engine.backend import Backend
from saccade.exact.long.backend import LONG
from saccade.exact.ragged.dense import DENSE
from saccade.exact.reference import REFERENCE
from saccade.exact.sdpa import SDPA
from saccade.exact.shared_bias.backend import SHARED_BIAS
from saccade.exact.short.backend import SHORT
from saccade.exact.volta.backend import HALF_SUMS, VOLTA

BACKENDS: tuple[Backend, ...] = (LONG, SHORT, VOLTA, HALF_SUMS, SHARED_BIAS, DENSE, SDPA, REFERENCE)
