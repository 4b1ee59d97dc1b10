"""Makes torch's exponentials on a CPU correct from the first call on."""

from __future__ import annotations

import torch


def settle() -> None:
    """Compute an exponential and a logarithm of one number each, on one thread. This takes 1 ms, when saccade is imported.

    torch passes both to the vector functions of oneMKL, which look for their kernel at the first call. For a tensor of some thousand numbers
    several threads make that call at once, and one may get a kernel of 12 right bits. On a busy machine about 1 process in 30 had errors of
    6e-5 in the first result of a call, and none later (oneMKL before 2025.0; pytorch issue 188792). A first call on one thread prevents this.
    """
    if not torch.backends.mkl.is_available():
        return
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        one.exp().log()
