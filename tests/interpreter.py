"""Makes Triton's interpreter several times as fast by removing work that it repeats for each operation and each call of a device
function. Results do not change. It patches private names of Triton, so it applies only to the release it was written for; with
another one the interpreter stays as slow as Triton made it. Adapt this file after an upgrade."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core, semantic
from triton.runtime import interpreter

RELEASE = "3.6."

# scalars whose operations are numpy's: not bfloat16 and float8, which it lacks, nor booleans, which keep the type of what was compared
NUMBERS = {t.name: t for t in (tl.float16, tl.float32, tl.float64, tl.int32, tl.int64, tl.uint32, tl.uint64)}
INTEGERS = {"int32": 32, "int64": 64}
MEMBERS = {"__add__": "add", "__sub__": "sub", "__mul__": "mul"}
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITWISE = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}
COMPARISONS = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip

_patched: set[Any] = set()
_member = core.tensor.__add__.__code__  # of every wrapper that `builtin` makes


def speed_up() -> None:
    """To be called once, before a kernel runs."""
    if not triton.__version__.startswith(RELEASE):
        return
    interpreter.InterpretedFunction.__call__ = _call_patched_once
    interpreter.GridExecutor.__call__ = _forgetting(interpreter.GridExecutor.__call__)
    interpreter._get_np_dtype = _looked_up(interpreter._get_np_dtype)
    interpreter._patch_builtin = _patch_builtin
    # overflow is checked in every sum, but not reported without `debug`
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # shapes are values, so one object for each is enough; the name of a type is made when it is needed
    tl.tensor.__init__ = _init_tensor
    tl.dtype.sizes = ()  # of a block_type its shape, as integers
    tl.block_type.__init__ = _init_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.dtype.__eq__ = _same_first(tl.dtype.__eq__)
    tl.dtype.is_int = lambda self, names=frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES): self.name in names
    tl.dtype.is_floating = lambda self, names=frozenset(tl.dtype.FP_TYPES): self.name in names
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    interpreter._validate_np_data_size = _fits
    interpreter.TensorHandle.__init__ = _init_handle
    of_builder, of_values = interpreter.InterpreterBuilder, semantic.TritonSemantic
    of_builder.create_expand_dims = _expand_dims(of_builder.create_expand_dims)
    of_builder.create_splat = _splat(of_builder.create_splat)
    of_builder.binary_op = _binary_op
    of_values.to_tensor = _to_tensor(of_values.to_tensor)
    for name, operation in {**ARITHMETIC, **BITWISE, **COMPARISONS}.items():
        setattr(of_values, name, _by_numpy(getattr(of_values, name), operation, name))
    of_values.add = _add_to_pointer(of_values.add)
    of_values.scalar_constant = _scalar_constant(of_values.scalar_constant)
    of_values.cast = _cast(of_values.cast)
    of_values.broadcast_impl_value = _broadcast(of_values.broadcast_impl_value)
    of_values.binary_op_type_checking_impl = _checked(of_values.binary_op_type_checking_impl)


# --- calls


def _call_patched_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    # triton.language is already patched for the whole launch; patching again changes nothing and costs more than the function
    if self.fn not in _patched:
        languages = tuple(id(x) for x in self.fn.__globals__.values() if x is tl or x is core)
        if languages not in _patched:
            interpreter._patch_lang(self.fn)
            _patched.add(languages)
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


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _interpreted(package):
        scope.set_attr(package, name, member)


@functools.cache
def _interpreted(package: Any) -> list[tuple[str, Any]]:
    """The replacements for the functions of a module or class during a launch. Found once, before any of them is replaced."""
    return [(name, _given(package, name, x)) for name, x in inspect.getmembers(package) if core.is_builtin(x)]


def _given(package: Any, name: str, member: Any) -> Any:
    """A function of Triton's language that is given the interpreter's builder."""
    values = interpreter.interpreter_semantic
    inner = member.__wrapped__ if getattr(member, "__code__", None) is _member else member
    if package is tl.tensor and name in MEMBERS:
        operation, unwrapped = getattr(values, MEMBERS[name]), core._unwrap_if_constexpr
        return lambda self, other, **_: operation(self, unwrapped(other), True)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = values
        return inner(*args, **kwargs)

    return call


def _unwrapped(slow: Any) -> Any:
    plain = {tl.tensor, int, float, bool, str, type(None)}

    def unwrap(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is tl.constexpr else o if kind in plain else slow(o)

    return unwrap


# --- types


def _looked_up(find: Any) -> Any:
    """The numpy dtype of a type, without a new table of all types each time."""
    by_name: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        scalar = kind.scalar  # of a block of pointers, too, the pointer
        if type(scalar) is tl.pointer_type:
            return find(scalar)
        if (found := by_name.get(scalar.name)) is None:
            found = by_name[scalar.name] = find(scalar)
        return found

    return look_up


def _same_first(slow: Any) -> Any:
    return lambda self, other: self is other or slow(self, other)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of_tensor(type.sizes)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    self.element_ty = element_ty
    self.sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in sizes])
    self.numel, self.shape = _shape_of_type(self.sizes)


@functools.cache
def _shape_of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


@functools.cache
def _shape_of_type(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return validate_block_shape(sizes), tl.tuple(sizes)


@functools.cache
def _joined(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes of two operands broadcast, () of two scalars; None where Triton adds axes or raises."""
    if not left or not right:
        return left or right
    if len(left) != len(right) or any(a != b and a != 1 and b != 1 for a, b in zip(left, right, strict=True)):
        return None
    return tuple(map(max, left, right))


@functools.cache
def _number_type(name: str, sizes: tuple[int, ...]) -> Any:
    scalar = tl.int1 if name == "int1" else NUMBERS[name]
    return tl.block_type(scalar, sizes) if sizes else scalar


# --- values


def _fits(array: Any, dtype: Any) -> bool:
    return type(dtype) is tl.pointer_type or array.itemsize <= 1 or array.itemsize * 8 <= dtype.primitive_bitwidth


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and not _fits(data, dtype):
        self.__post_init__()


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if output.itemsize > 1 and not _fits(output, dtype):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def _expand_dims(slow: Any) -> Any:
    def expand(self: Any, arg: Any, axis: int) -> Any:
        if axis < 0:
            return slow(self, arg, axis)
        return interpreter.TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    return expand


def _splat(slow: Any) -> Any:
    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if isinstance(arg.dtype, tl.block_type):
            return slow(self, ret_ty, arg)
        data = np.empty(ret_ty.sizes, dtype=interpreter._get_np_dtype(arg.dtype))
        data[...] = arg.data
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    return splat


def _scalar_constant(slow: Any) -> Any:
    known: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or dtype.name not in NUMBERS or type(value) not in (int, float):
            return slow(self, value, dtype)
        key = (value, dtype.name)
        if (data := known.get(key)) is None:
            if len(known) > 4096:
                known.clear()
            data = known[key] = slow(self, value, dtype).handle.data
            data.flags.writeable = False
        # a handle of its own: a shift changes those that it is given
        return self.tensor(interpreter.TensorHandle(data, dtype), dtype)

    return constant


def _to_tensor(slow: Any) -> Any:
    return lambda self, x, check_type=True: x if type(x) is tl.tensor else slow(self, x, check_type)


def _as_number(values: Any, given: Any, dtype: Any) -> Any:
    """A number of Python as a constant of a tensor's type, None where Triton promotes, checks or refuses."""
    kind, name = type(given), dtype.name
    if kind is int and -(2**31) <= given < 2**31 and (name in INTEGERS or (name in NUMBERS and dtype.is_floating())):
        return values.scalar_constant(given, dtype)
    if kind is float and name in NUMBERS and dtype.is_floating():
        return values.scalar_constant(given, dtype)
    return None


def _pair(values: Any, left: Any, right: Any) -> tuple[Any, Any] | None:
    """Two operands as tensors of the same type of numbers; None where there is more to decide."""
    if type(left) is not tl.tensor:
        if type(right) is not tl.tensor:
            return None
        left = _as_number(values, left, right.dtype)
    elif type(right) is not tl.tensor:
        right = _as_number(values, right, left.dtype)
    elif left.dtype is not right.dtype:
        if left.dtype.name not in INTEGERS or right.dtype.name not in INTEGERS:
            return None
        left, right = values.cast(left, tl.int64), values.cast(right, tl.int64)
    elif left.dtype is tl.int1:
        if not left.type.sizes or not right.type.sizes:
            return None  # broadcast, a boolean that was compared gets the type of what was
    elif left.dtype.name not in NUMBERS:
        return None
    return None if left is None or right is None else (left, right)


def _by_numpy(slow: Any, operation: Any, name: str) -> Any:
    """An operation on two tensors of one type: numpy broadcasts them itself."""
    compares, bits = name in COMPARISONS, name in BITWISE

    def run(self: Any, input: Any, other: Any, *options: Any) -> Any:
        if (found := _pair(self, input, other)) is not None:
            left, right = found
            sizes = _joined(left.type.sizes, right.type.sizes)
            if sizes is not None and not (left.dtype.is_floating() if bits else left.dtype is tl.int1):
                handle = self.builder.binary_op(left.handle, right.handle, operation)
                return self.tensor(handle, _number_type("int1" if compares else left.dtype.name, sizes))
        return slow(self, input, other, *options)

    return run


def _add_to_pointer(add: Any) -> Any:
    def run(self: Any, input: Any, other: Any, sanitize_overflow: bool) -> Any:
        if type(input) is tl.tensor and type(input.dtype) is tl.pointer_type:
            offset = self.to_tensor(other) if type(other) is int else other
            if type(offset) is tl.tensor and offset.dtype.name in INTEGERS:
                sizes = _joined(input.type.sizes, offset.type.sizes)
                if sizes is not None:
                    kind = input.type if sizes == input.type.sizes else tl.block_type(input.dtype, sizes)
                    return self.tensor(self.builder.create_addptr(input.handle, offset.handle), kind)
        return add(self, input, other, sanitize_overflow)

    return run


def _cast(slow: Any) -> Any:
    sources = {*NUMBERS, "int1"} - {"fp16"}

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        direct = source.name in sources or (source.name == "fp16" and target is tl.float32)
        if fp_downcast_rounding is None and direct and target.name in NUMBERS:
            kind = _number_type(target.name, input.type.sizes)
            return self.tensor(self.builder.cast_impl(input.handle, kind), kind)
        return slow(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _broadcast(slow: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.sizes, rhs.type.sizes
        if left == right:
            return lhs, rhs
        sizes = _joined(left, right)
        if sizes is None:
            return slow(self, lhs, rhs)
        return _to_sizes(self, lhs, sizes), _to_sizes(self, rhs, sizes)

    return broadcast


def _to_sizes(values: Any, of: Any, sizes: tuple[int, ...]) -> Any:
    if of.type.sizes == sizes:
        return of
    kind, make = tl.block_type(of.dtype, sizes), values.builder
    return values.tensor(make.create_broadcast(of.handle, sizes) if of.type.sizes else make.create_splat(kind, of.handle), kind)


def _checked(slow: Callable[..., Any]) -> Any:
    def check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if arithmetic_check and not div_or_mod and (found := _pair(self, lhs, rhs)) is not None:
            return self.broadcast_impl_value(*found)
        return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check
