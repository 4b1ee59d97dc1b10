"""torch's own `scaled_dot_product_attention`, bound when saccade is imported, because code may replace it by `saccade.attention` later."""

import torch.nn.functional as F
from torch import Tensor

from saccade.engine.arguments import is_normal_scale

torch_attention = F.scaled_dot_product_attention


def scaled_as_torch_takes_it(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """(query, scale) with the same scores and a scale that torch's kernels take."""
    if is_normal_scale(scale):
        return query, scale
    return (-query, -scale) if is_normal_scale(-scale) else (query * scale, 1.0)
