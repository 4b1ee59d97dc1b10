"""The last step of a cuDNN graph, before which all its tensors are told (`nvidia-cudnn-frontend`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plan(graph: Any, device: torch.device) -> Tensor:
    """Choose how a graph runs; the memory that it works in.

    Raises:
        RuntimeError: cuDNN refuses the graph.
    """
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
