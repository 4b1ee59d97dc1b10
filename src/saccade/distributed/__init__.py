"""Attention over a sequence that is sharded over ranks of `torch.distributed`. Import it by its name; `import saccade` does not."""

from saccade.distributed.context import dynamic_mask_attention
from saccade.distributed.ring import attention, head_tail

__all__ = ["attention", "dynamic_mask_attention", "head_tail"]
