"""`replace_sdpa`: code that calls torch's `scaled_dot_product_attention` runs `saccade.attention`, without an edit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from saccade.engine.torch_sdpa import torch_attention
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.api import attention

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
    """What stands in the place of torch's function under `replace_sdpa`: `saccade.attention`, or torch's function where only that
    has a meaning; see there."""
    if _is_for_torch(query, key, value, attn_mask):
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (InvalidArgument, UnsupportedProblem):
        # torch takes some arguments that we refuse (a mask beside is_causal, strided nested tensors); what it refuses too raises torch's error
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_for_torch(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether only torch's function computes what such a call means."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return True  # vmap, jvp and the gradients of torch.func, which our kernels refuse
    if has_torch_function((query, key, value, attn_mask)) and _overloaded(query, key, value, attn_mask):
        return True
    # under sdpa_kernel(SDPBackend.MATH), torch's way to second derivatives
    return isinstance(query, Tensor) and query.is_cuda and not torch.backends.cuda.flash_sdp_enabled() and _math_alone()


def _overloaded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether a tensor brings its own meaning of torch's functions, other than jagged nested tensors, which `attention` takes; a
    mode, as of `torch.set_default_device`, is none of them."""
    given = (query, key, value, attn_mask)
    return any(type(x) not in _PLAIN and not (isinstance(x, Tensor) and x.is_nested) for x in given)


def _math_alone() -> bool:
    cuda = torch.backends.cuda
    return not (cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if type(attn_mask).__module__ == "torch.nn.attention.bias":
        # torch's causal biases ask whether the function that they meet is the one that stands in torch.nn.functional at that moment
        current: Callable[..., Tensor] = F.scaled_dot_product_attention
        options = {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return torch.overrides.handle_torch_function(current, (attn_mask,), *given, **options)
    return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class _Process:
    """What is replaced in this process: how many handles want it, and what stood there before the first. Guarded by `lock`."""

    lock = threading.Lock()
    wanted = 0
    before: Any = None


class Replacement:
    """The handle that `replace_sdpa` returns. As a context manager it restores at the end of the block."""

    def __init__(self) -> None:
        with _Process.lock:
            if _Process.wanted == 0:
                _Process.before = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
            else:
                _refuse_foreign("a second replacement would not reach the calls that run it")
            _Process.wanted += 1
        self._active = True

    @property
    def active(self) -> bool:
        """Whether this handle still keeps torch's function replaced."""
        return self._active

    def restore(self) -> None:
        """Give this replacement up; the last one of the process puts back what stood there before the first. Once it has been
        given up, nothing happens.

        Raises:
            SaccadeError: this is the last one, and somebody else has put another function there meanwhile.
        """
        with _Process.lock:
            if not self._active:
                return
            if _Process.wanted == 1:
                _refuse_foreign("to restore torch's function would undo that")
                F.scaled_dot_product_attention, _Process.before = _Process.before, None
            _Process.wanted -= 1
            self._active = False

    def __enter__(self) -> Replacement:
        if not self._active:
            raise SaccadeError("this replacement was restored; make another by saccade.replace_sdpa()")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<saccade.replace_sdpa(): {'active' if self._active else 'restored'}>"


def _refuse_foreign(consequence: str) -> None:
    current = F.scaled_dot_product_attention
    if current is not scaled_dot_product_attention:
        name = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        raise SaccadeError(
            f"torch.nn.functional.scaled_dot_product_attention is {name}, which took its place after saccade.replace_sdpa(); {consequence}: "
            "restore what that one replaced first, then call this again"
        )


def replace_sdpa() -> Replacement:
    """Let every call of `torch.nn.functional.scaled_dot_product_attention` in this process run `saccade.attention`.

        with saccade.replace_sdpa():
            out = model(x)

        replacement = saccade.replace_sdpa()  # until replacement.restore()

    The function that stands there meanwhile has torch's signature and meaning: `softmax(scale * Q K^T + mask) V` of `[B, H, T, D]`.
    A call that `attention` refuses and torch takes (a mask together with `is_causal`) runs torch's function, and so do calls
    under vmap, jvp and the other transformations of `torch.func`, tensors of subclasses with a `__torch_function__` of their own, and on a GPU
    calls under `sdpa_kernel(SDPBackend.MATH)`, which has second derivatives. Dropout follows `torch.manual_seed`, with other draws than
    torch's where a kernel of saccade runs. Graphs of `torch.compile` are compiled anew.

    Replacements may be nested and given up in any order: they are counted, and the last one restores what stood there before the
    first. All threads see the same function at any time, whichever thread replaced it.

    Not reached are:

    * code that took the function itself before, as by `from torch.nn.functional import scaled_dot_product_attention`, and models exported
      or scripted before; `torch.jit.script` does not compile the Python function that stands there meanwhile;
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
