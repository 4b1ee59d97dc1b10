"""Triangle attention of structure models, with the parameter names of OpenFold, so that weights of such models load."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.engine.arguments import check_flag
from saccade.engine.kinds import check_kinds_but_sharded
from saccade.errors import InvalidArgument
from saccade.exact.triangle import attend_rows
from saccade.nn.checks import check_backend, check_epsilon, check_made, check_plain, check_size
from saccade.nn.module import Module


class GatedAttention(Module):
    """The projections of `TriangleAttention`: queries, keys and values, a gate for each number of the output, and the output.

    Its arguments are those of `TriangleAttention`.
    """

    def __init__(self, c_in: int, c_hidden: int, no_heads: int, bias: bool, backend: str, **made: object) -> None:
        super().__init__()
        self.no_heads, self.backend = no_heads, backend
        width = c_hidden * no_heads
        self.linear_q = nn.Linear(c_in, width, bias=False, **made)  # type: ignore[arg-type]
        self.linear_k = nn.Linear(c_in, width, bias=False, **made)  # type: ignore[arg-type]
        self.linear_v = nn.Linear(c_in, width, bias=False, **made)  # type: ignore[arg-type]
        self.linear_o = nn.Linear(width, c_in, bias=bias, **made)  # type: ignore[arg-type]
        self.linear_g = nn.Linear(c_in, width, bias=bias, **made)  # type: ignore[arg-type]

    def forward(self, x: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
        """`[B, I, J, C]` with a bias `[B, H, J, J]` that the I rows share; visible: bool `[B, I, J]`."""
        query, key, value = (
            linear(x).unflatten(-1, (self.no_heads, -1)).transpose(2, 3)
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        heads = attend_rows(query, key, value, bias, visible, None, self.backend).transpose(2, 3).flatten(3)
        return self.linear_o(heads * torch.sigmoid(self.linear_g(x)))


class TriangleAttention(Module):
    """Attention within each row of a pair representation, with a bias of the pair itself that all rows share.

        x = layer_norm(z),  b = linear(x)                                        [J, J, H]
        out_ij = linear_o(sigmoid(linear_g(x_ij)) * softmax_k(q_ij k_ik / sqrt(D) + b_jk) v_ik)

    Around the starting node the rows are those of z; around the ending node they are its columns. `load_state_dict` takes the state of the module
    of that name in OpenFold, Boltz and Protenix: layer_norm, linear, and mha.linear_q, k, v, o and g.

    Args:
        c_in: C, numbers of a pair.
        c_hidden: D, of each head.
        no_heads: H.
        starting: whether the rows are those of z, or else its columns.
        bias: whether the gate and the output add a bias, as in OpenFold; Boltz has none.
        eps: of the layer norm.
        backend: as in `saccade.attention`.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size or an input is invalid.

    Source: "Highly accurate protein structure prediction with AlphaFold" (Jumper et al. 2021), algorithms 13 and 14 of its supplement.
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        starting: bool = True,
        *,
        bias: bool = True,
        eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("c_in", c_in), ("c_hidden", c_hidden), ("no_heads", no_heads)):
            check_size(name, size)
        check_made(device, dtype, bias)
        check_backend(backend)
        check_epsilon("eps", eps)
        self.c_in, self.c_hidden, self.no_heads = c_in, c_hidden, no_heads
        self.starting = check_flag("starting", starting)
        self.layer_norm = nn.LayerNorm(c_in, eps=eps, device=device, dtype=dtype)
        self.linear = nn.Linear(c_in, no_heads, bias=False, device=device, dtype=dtype)
        self.mha = GatedAttention(c_in, c_hidden, no_heads, bias, backend, device=device, dtype=dtype)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            z: `[*, I, J, C]`, with any dims in front.
            mask: `[*, I, J]`, True or not 0 where a pair is real; others are not attended to. A row without a real pair gives only the bias of
                `linear_o`, and is padding itself.

        Returns:
            `[*, I, J, C]`: what a block adds to z.
        """
        check_kinds_but_sharded(z=z, mask=mask)
        if not isinstance(z, Tensor) or z.dim() < 3 or z.shape[-1] != self.c_in or z.shape[-2] != z.shape[-3]:
            shape = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise InvalidArgument(f"z is {shape}; it must be a torch.Tensor of shape [*, N, N, {self.c_in}]")
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != z.shape[:-1]):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise InvalidArgument(f"mask is {shape}; it must be a torch.Tensor of shape {list(z.shape[:-1])}")
        check_plain("z", z, "TriangleAttention")
        structures = math.prod(z.shape[:-3])
        x = z.reshape(structures, *z.shape[-3:])
        seen = None if mask is None else (mask != 0).reshape(structures, *mask.shape[-2:])
        if not self.starting:
            x, seen = x.transpose(1, 2), None if seen is None else seen.transpose(1, 2)
        x = self.layer_norm(x)
        # the kernels read the bias many times, and its rows lie one after another in memory
        bias = self.linear(x).permute(0, 3, 1, 2).contiguous()
        out = self.mha(x, bias, seen)
        return (out if self.starting else out.transpose(1, 2)).reshape(z.shape)

    def extra_repr(self) -> str:
        return f"c_in={self.c_in}, c_hidden={self.c_hidden}, no_heads={self.no_heads}, starting={self.starting}"
