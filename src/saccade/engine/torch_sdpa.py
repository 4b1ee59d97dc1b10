"""torch's own `scaled_dot_product_attention`, bound while saccade is imported: somebody may put `saccade.attention` in its place later."""

import torch.nn.functional as F

torch_attention = F.scaled_dot_product_attention
