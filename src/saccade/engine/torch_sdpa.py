"""torch's own `scaled_dot_product_attention`, bound while saccade is imported: somebody may put `saccade.attention` in its place later."""

import torch.nn.functional as F
from torch import Tensor

# below it a scale is 0 in float32
_LEAST_SCALE = 2.0**-126


def takes_scale(scale: float) -> bool:
    """Whether torch's kernels are right with this scale. They hide keys by a score of -inf and then multiply by the scale, which makes NaN or inf of
    it unless the scale is positive."""
    return scale >= _LEAST_SCALE


def scaled_as_torch_takes_it(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """(query, scale) with the same scores and a scale that torch's kernels take."""
    if takes_scale(scale):
        return query, scale
    return (-query, -scale) if takes_scale(-scale) else (query * scale, 1.0)


torch_attention = F.scaled_dot_product_attention
