"""`saccade.disabled()`: a block in which no kernel of ours runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saccade.engine import prepare, switch


@contextmanager
def disabled() -> Iterator[None]:
    """Run every call of this process by torch's own operations inside the block, to find out whether a kernel of ours is at fault.

        with saccade.disabled():
            out = model(x)  # a result that stays wrong is not ours

    `backend="auto"` chooses among torch's kernels and the references, which are slow and take O(Tq * Tk) memory. A backend of ours that is named raises
    `UnsupportedProblem`. `replace_sdpa` passes calls to torch's function, and optimised encoders run their stock forward. `SACCADE_DISABLE=1` in the
    environment does the same for a whole process. All threads are affected; blocks may be nested and overlap.

    Programs that were compiled, exported or captured in a CUDA graph outside of the block keep the kernels that they were made with.
    """
    switch.change(1)
    prepare.forget()  # remembered calls, also those in C++
    try:
        yield
    finally:
        switch.change(-1)
        prepare.forget()
