"""Launches a Triton kernel again without repeating the work of Triton's own launcher. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.env import interpreting_triton
from saccade.errors import CompileError
from saccade.hardware import arch_of
from saccade.nvrtc import loading_allowed
from saccade.recorder import ACTIVE

# remembered launches; only an endless stream of new shapes reaches it
_LIMIT = 4096
_runners: dict[tuple, tuple[Any, Any, Any]] = {}


def launch(kernel: Any, programs: int | tuple[int, int], tensors: Sequence[Tensor], numbers: tuple, **options: Any) -> None:
    """Run `kernel` on `programs` programs. The tensors are its first arguments, followed by the numbers, constexprs included.

    Triton's own launch costs about 20 us of host time per kernel. Here the compiled kernel is remembered by everything it may
    depend on: the numbers, the options, the device, and the dtype and 16-byte alignment of each tensor. It is given addresses
    instead of tensors.

    Multiplications and additions are fused explicitly, since Triton 3.10 will no longer do so by default.
    """
    options.setdefault("enable_fp_fusion", True)
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Triton launches on the current device, whatever device the tensors are on
        with torch.cuda.device(device):
            _launch(kernel, grid, tensors, numbers, options)
    else:
        _launch(kernel, grid, tensors, numbers, options)


def _launch(kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: tuple, options: dict[str, Any]) -> None:
    addresses = [t.data_ptr() for t in tensors]
    aligned = tuple([a % 16 == 0 for a in addresses])
    # keyed by the id of the kernel: its own hash is that of its source, computed in Python at every lookup
    key = (id(kernel), grid, numbers, tuple(options.items()), tuple([t.dtype for t in tensors]), aligned, tensors[0].device.index)
    found = _runners.get(key)
    if found is not None:
        found[0](*addresses, *numbers)
    else:
        compiled = first_launch(kernel, grid, (*tensors, *numbers), options)
        if interpreting_triton():
            return
        # bound to the kernel and the grid; looks up the current stream at each call
        found = _remember(key, compiled[grid], compiled, kernel)
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.triton(found[1], grid, tensors, (*addresses, *numbers))


def _remember(key: tuple, runner: Any, compiled: Any, kernel: Any) -> tuple[Any, Any, Any]:
    """The kernel is kept so that no other gets its id."""
    if len(_runners) >= _LIMIT:
        _runners.clear()
    return _runners.setdefault(key, (runner, compiled, kernel))


def launch_any(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    varying: tuple[int, ...],
    numbers: tuple,
    follows: tuple[int, int, int] | None = None,
    **options: Any,
) -> None:
    """`launch` with numbers that change from call to call, such as the tokens of a ragged batch: `varying` comes between tensors and
    numbers.

    The kernel names them in `do_not_specialize`, so that one binary serves all of their values below 2^31; the number of programs is free too.
    follows: for a recorder, how the programs follow from such numbers.
    """
    options.setdefault("enable_fp_fusion", True)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_any(kernel, (programs, 1, 1), tensors, varying, numbers, follows, options)
    else:
        _launch_any(kernel, (programs, 1, 1), tensors, varying, numbers, follows, options)


def _launch_any(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    varying: tuple[int, ...],
    numbers: tuple,
    follows: tuple[int, int, int] | None,
    options: dict[str, Any],
) -> None:
    addresses = [t.data_ptr() for t in tensors]
    aligned = tuple([a % 16 == 0 for a in addresses])
    dtypes = tuple([t.dtype for t in tensors])
    key = (id(kernel), "any", numbers, tuple(options.items()), dtypes, aligned, tensors[0].device.index)
    found = _runners.get(key)
    if found is not None:
        found[1][grid](*addresses, *varying, *numbers)
    else:
        _check_free(kernel, len(tensors), len(varying))
        # plain ints: a recorder's are of a type that Triton does not know
        compiled = first_launch(kernel, grid, (*tensors, *map(int, varying), *numbers), options)
        if interpreting_triton():
            return
        found = _remember(key, None, compiled, kernel)
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.triton_any(found[1], follows, tensors, addresses, varying, numbers)


def _check_free(kernel: Any, first: int, count: int) -> None:
    """Parameters that take numbers of each call must not be compiled for their values."""
    if not interpreting_triton():
        free = [p.name for p in kernel.params if p.do_not_specialize]
        named = [p.name for p in kernel.params[first : first + count]]
        assert set(named) <= set(free), f"{kernel.__name__} is compiled for the values of {sorted(set(named) - set(free))}"


def first_launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple, options: dict[str, Any]) -> Any:
    """Compile and run a kernel with Triton's own launcher; returns the compiled kernel.

    Raises:
        CompileError: Triton cannot compile it, or the device cannot load the result. Each part of Triton's compiler has its own
            errors, so every error counts except those of a running device.
    """
    try:
        with loading_allowed(_device_of(arguments)):
            return kernel[grid](*arguments, **options)
    except Exception as error:
        if not _compiles() or isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)) or _is_of_device(error):
            raise
        import triton

        name = getattr(kernel, "__name__", str(kernel))
        summary = (
            f"Triton {triton.__version__} cannot compile {name} (torch {torch.__version__}, sm_{arch_of(_device_of(arguments))})"
        )
        raise CompileError(summary, (), f"{type(error).__name__}: {error}") from error


def _compiles() -> bool:
    return not interpreting_triton()


def _is_of_device(error: Exception) -> bool:
    """Whether the driver reports a fault other than a kernel that it cannot load."""
    text = str(error)
    return text.startswith("Triton Error [CUDA]") and not any(
        word in text for word in ("image", "PTX", "invalid source", "unsupported")
    )


def _device_of(arguments: tuple) -> torch.device:
    # a TMA descriptor has its tensor as `base`
    found = (getattr(x, "base", x) for x in arguments)
    return next((x.device for x in found if isinstance(x, Tensor)), torch.device("cpu"))


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 1. Triton's own function takes 5 us of host time."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
