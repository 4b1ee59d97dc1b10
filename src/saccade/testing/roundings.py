"""The roundings of a family of kernels besides the unavoidable ones: its baseline has them too."""

from __future__ import annotations

from typing import NamedTuple


class Roundings(NamedTuple):
    """Each True where the kernels round so, or may.

    delta_of_out: the row sums of `P dP` come from dout and the rounded out, as in kernels that see a row in pieces.
    half_sums: products are added in float16, four at a time, as in kernels that trade exactness for registers. Products with values are summed in tiles
        of 16 keys, those of dq in tiles of 64 keys, and those of dk and dv in tiles of 32 queries. The tiles are added in float16.
    rounded_weights: the weights are rounded before dS and its row sums are taken, as in kernels that hold whole rows in the registers of one program.
        Without a bias, whose gradient would show it. Together with delta_of_out: a kernel does either.
    rounded_terms: the gradients of scores are rounded before they are added up to that of a bias, as torch does it.
    """

    delta_of_out: bool = False
    half_sums: bool = False
    rounded_weights: bool = False
    rounded_terms: bool = False


UNAVOIDABLE = Roundings()
IN_PIECES = Roundings(delta_of_out=True)
