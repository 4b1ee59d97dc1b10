"""`replace_sdpa`: unchanged code that calls torch's `scaled_dot_product_attention` runs `saccade.attention`."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions, has_torch_function

from saccade.engine.switch import is_disabled
from saccade.engine.torch_sdpa import torch_attention
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.api import attention
from saccade.exact.causal_bias import is_causal_bias

_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The function that replaces torch's: `saccade.attention`, or torch's function for calls that only it supports; see `replace_sdpa`."""
    if is_causal_bias(attn_mask):
        # the bias calls the function in torch.nn.functional, which is ours now
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        kind: Any = type(attn_mask)
        return kind.__torch_function__(F.scaled_dot_product_attention, (kind,), given, options)
    if not _is_for_torch(query, key, value, attn_mask):
        # torch takes some arguments that we refuse (a mask together with is_causal, strided nested tensors); if it refuses them too, its error is raised
        with contextlib.suppress(InvalidArgument, UnsupportedProblem):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _is_for_torch(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether only torch's function computes what such a call means."""
    if is_disabled() or not _every_kernel_of_torch_is_allowed():
        return True
    given = (query, key, value, attn_mask)
    if has_torch_function(given) and any(_is_of_another_kind(x) for x in given):
        return True
    if torch.compiler.is_compiling():
        return False
    # vmap, jvp and the gradients of torch.func, which our kernels refuse
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _is_of_another_kind(tensor: Any) -> bool:
    """Whether this brings its own meaning of torch's functions, other than jagged nested tensors, which `attention` takes; a mode, as of
    `torch.set_default_device`, is none of them."""
    return type(tensor) not in _PLAIN and not (isinstance(tensor, Tensor) and tensor.is_nested)


def _every_kernel_of_torch_is_allowed() -> bool:
    """Whether no choice among torch's kernels is active, such as `torch.nn.attention.sdpa_kernel`; then torch's function must run."""
    flags = torch._C
    return (
        flags._get_flash_sdp_enabled()
        and flags._get_mem_efficient_sdp_enabled()
        and flags._get_math_sdp_enabled()
        and flags._get_cudnn_sdp_enabled()
    )


class _Process:
    """The replacement in this process: how many handles want it, and the function before the first. Guarded by `lock`."""

    def __init__(self) -> None:
        self.lock, self.wanted = threading.Lock(), 0
        self.before: Any = None


# importlib.reload runs this file again in the same namespace, with torch's function still replaced
_process: _Process = globals().get("_process") or _Process()


class Replacement:
    """The handle that `replace_sdpa` returns. As a context manager it restores at the end of the block."""

    def __init__(self) -> None:
        with _process.lock:
            if _process.wanted == 0:
                _prepare_torch()
                _process.before = F.scaled_dot_product_attention
            else:
                _refuse_foreign("a second replacement would not reach the calls that run it")
            F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
            _process.wanted += 1
        self._active = True

    @property
    def active(self) -> bool:
        """Whether this handle still keeps torch's function replaced."""
        return self._active

    def restore(self) -> None:
        """Give this replacement up; the last one of the process restores the function before the first. Later calls do nothing.

        Raises:
            SaccadeError: this is the last one, and other code has put another function there meanwhile; what stood there before may be put back by
                anybody.
        """
        with _process.lock:
            if not self._active:
                return
            if _process.wanted == 1:
                _refuse_foreign("to restore torch's function would undo that")
                F.scaled_dot_product_attention, _process.before = _process.before, None
            _process.wanted -= 1
            self._active = False

    def __enter__(self) -> Replacement:
        if not self._active:
            raise SaccadeError("this replacement was restored; make another by saccade.replace_sdpa()")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<saccade.replace_sdpa(): {'active' if self._active else 'restored'}>"


def _prepare_torch() -> None:
    """Prepare torch for what it cannot find while its function is replaced."""
    # Once in a process torch lists the functions that subclasses of Tensor may override, and torch.compile copies that list. If it were made while our
    # function is in torch.nn.functional, it would lack torch's own for ever.
    get_overridable_functions()
    # torch.jit.script compiles the operator wherever it meets our function, whose Python it cannot compile
    torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def _refuse_foreign(consequence: str) -> None:
    current = F.scaled_dot_product_attention
    # by name, because a reload makes a new function
    ours = (
        getattr(current, "__module__", None) == __name__
        and getattr(current, "__qualname__", None) == "scaled_dot_product_attention"
    )
    if not ours and current is not _process.before:
        name = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        raise SaccadeError(
            f"torch.nn.functional.scaled_dot_product_attention is {name}, which took its place after saccade.replace_sdpa(); {consequence}: "
            "restore what that one replaced first, then call this again"
        )


def replace_sdpa() -> Replacement:
    """Make every call of `torch.nn.functional.scaled_dot_product_attention` in this process run `saccade.attention`.

        with saccade.replace_sdpa():
            out = model(x)

        replacement = saccade.replace_sdpa()  # until replacement.restore()

    The replacement has torch's signature and result: `softmax(scale * Q K^T + mask) V` of `[B, H, T, D]`.
    Torch's function still runs a call that `attention` refuses and torch accepts (a mask together with `is_causal`). It also runs calls under
    vmap, jvp and the other transformations of `torch.func`, and calls with subclasses that have a `__torch_function__` of their own.
    If somebody has chosen among torch's kernels, by `torch.nn.attention.sdpa_kernel` or by a function such as
    `torch.backends.cuda.enable_cudnn_sdp(False)`, torch's function runs every call; `sdpa_kernel(SDPBackend.MATH)` has second derivatives.
    Dropout follows `torch.manual_seed`; kernels of saccade draw other numbers than torch's.

    `torch.compile` recompiles a program when the function was replaced or restored since. So a program that was compiled inside the block does
    not run outside it, nor the other way round. Graphs of `torch.export`, AOTInductor and `torch.fx`, and captured CUDA graphs, keep the
    function with which they were made. A choice among torch's kernels is read when a program is compiled.

    Replacements may be nested and undone in any order. They are counted, and the last one restores the function from before the first. All
    threads see the same function at any time, whichever thread replaced it.

    Not reached are:

    * code that imported the function itself earlier, as by `from torch.nn.functional import scaled_dot_product_attention`, and models exported
      or scripted earlier; inside the block, too, `torch.jit.script` compiles torch's function;
    * C++ callers, and `torch.ops.aten.scaled_dot_product_attention`;
    * the fast path of `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder`, which computes attention in C++ in
      eval mode without gradients: `torch.backends.mha.set_fastpath_enabled(False)` turns it off, and the calls are reached. With
      `need_weights=True`, its default, `nn.MultiheadAttention` forms the weights itself.

    Returns:
        the handle of this replacement, a context manager with `restore()` and `active`.

    Raises:
        SaccadeError: a replacement is active and somebody has put another function in its place since; also from `restore()`.
    """
    return Replacement()
