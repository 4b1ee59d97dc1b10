"""Instance methods that replace those of a module's class while the module is served."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

_REPLICATE = "_replicate_for_data_parallel"


class Own:
    """Such a method. Copies of the module get that of their class: it must not run the weights of the original.

    Attributes:
        stock: the method that the module had.
    """

    def __init__(self, module: Any, name: str = "forward"):
        self.module, self.name, self.stock = module, name, getattr(module, name)
        self.__signature__, self.__doc__, self.__name__ = inspect.signature(self.stock), self.stock.__doc__, name
        if hasattr(self.stock, "__code__"):
            self.__code__ = self.stock.__code__  # torch.export reads it of a forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the class's method."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.module))
        return MethodType(getattr(type(copy), self.name), copy) if copy is not None else self.stock

    def __reduce__(self) -> Any:
        # the new module has no instance attribute yet, so this is the method of its class
        return getattr, (self.module, self.name)

    def put(self) -> None:
        """Attach it to the module."""
        setattr(self.module, self.name, self)
        if hasattr(self.module, _REPLICATE) and clear(self.module, _REPLICATE):
            setattr(self.module, _REPLICATE, _Replicate(self.module, _REPLICATE))


class _Replicate(Own):
    """`nn.DataParallel` copies the attributes of a module to each GPU, and with them a method that runs the original."""

    def __call__(self) -> Any:
        replica = self.stock()
        for name, x in [*vars(replica).items()]:
            if isinstance(x, Own):
                del replica.__dict__[name]
        return replica


def clear(module: Any, name: str = "forward") -> bool:
    """Remove the instance method that a copy of a served module got. False if another method remains, which other code has put there."""
    found = vars(module).get(name)
    if isinstance(found, MethodType) and found.__self__ is module and found.__func__ is getattr(type(module), name, None):
        delattr(module, name)
    return name not in vars(module)


def remove(module: Any, name: str = "forward") -> bool:
    """Restore the method of the class; returns whether the module had an instance method of ours."""
    if not isinstance(vars(module).get(name), Own):
        return False
    delattr(module, name)
    if {type(x) for x in vars(module).values() if isinstance(x, Own)} == {_Replicate}:
        delattr(module, _REPLICATE)
    return True
