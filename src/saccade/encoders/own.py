"""Methods that lie on a module in the place of those of its class, for as long as the module is served."""

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
        # asked of the new module before it has an attribute of its own, this is the method of its class
        return getattr, (self.module, self.name)

    def put(self) -> None:
        """Let the module have it."""
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
    """Drop the method of its class that a copy of a served module has of its own. False if another method is left, which somebody has put there."""
    found = vars(module).get(name)
    if isinstance(found, MethodType) and found.__self__ is module and found.__func__ is getattr(type(module), name, None):
        delattr(module, name)
    return name not in vars(module)


def remove(module: Any, name: str = "forward") -> bool:
    """Leave a module the method of its class; whether it had one of its own from here."""
    if not isinstance(vars(module).get(name), Own):
        return False
    delattr(module, name)
    if {type(x) for x in vars(module).values() if isinstance(x, Own)} == {_Replicate}:
        delattr(module, _REPLICATE)
    return True
