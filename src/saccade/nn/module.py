"""The parts that the modules have in common."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from saccade.errors import UnsupportedProblem


class Module(nn.Module):
    """A module that `torch.jit.script` refuses with a message: its compiler does not know the functions that these modules call."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise UnsupportedProblem(
            f"torch.jit.script does not compile {type(self).__name__} of saccade.nn; use torch.compile, torch.export or torch.jit.trace"
        )
