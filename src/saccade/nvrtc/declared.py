"""The parameter list of a kernel, read from its source, so that no launcher writes it down again."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from saccade.errors import InvalidArgument
from saccade.nvrtc.arguments import Parameters
from saccade.nvrtc.compiler import Options
from saccade.nvrtc.source import Source, reached

_TYPES = {
    "long long": "int64", "int64": "int64", "int": "int32", "u32": "uint32", "unsigned": "uint32", "u64": "uint64", "float": "float32",
    "__grid_constant__ TensorMap": "tensor_map",
}  # fmt: skip
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PIECE = re.compile(r"(?:const\s+)?(?P<type>[\w\s]+?)\s*(?P<pointer>\*\s*|\s)(?P<name>\w+)")


class _Declared(NamedTuple):
    """A parameter, and the macro that must not be zero for it to be there, or ""."""

    name: str
    kind: str
    macro: str


def parameters_of(source: Source, kernel: str, options: Options) -> Parameters:
    """The parameters of a kernel of a source that is compiled with these options: names, types and order.

    A list may hold `#if NAME ... #endif` and macros that expand to a part of it. It is read once a process.

    Raises:
        InvalidArgument: the source has no such kernel, or its list has a type or a condition that is not known here.
    """
    declared = _declared(source, kernel)
    given = dict(options.defines)
    macros = {one.macro for one in declared if one.macro}
    return _parameters(source, kernel, frozenset(name for name in macros if given.get(name, "0") != "0"))


@functools.cache
def _parameters(source: Source, kernel: str, macros: frozenset[str]) -> Parameters:
    return Parameters([(one.name, one.kind) for one in _declared(source, kernel) if not one.macro or one.macro in macros])


@functools.cache
def _declared(source: Source, kernel: str) -> tuple[_Declared, ...]:
    listed = _list_of(source.text(), kernel)
    if listed is None:
        raise InvalidArgument(f"{source.path.name} has no kernel {kernel}")
    about = f"kernel {kernel} of {source.path.name}"
    return tuple(_read(piece, macro, about) for piece, macro in _pieces(_expanded(_COMMENT.sub("", listed), source), about))


def _list_of(text: str, kernel: str) -> str | None:
    """The text between the parentheses of a kernel, whose body begins with the first brace."""
    for after in text.split("__global__")[1:]:
        head = after.partition("{")[0]
        before, opened, listed = head.partition(f" {kernel}(")
        if opened and ";" not in before:
            return listed.rpartition(")")[0]
    return None


def _pieces(text: str, about: str) -> list[tuple[str, str]]:
    """(a parameter in C++, the macro that it depends on) of each parameter of a list."""
    pieces, macro = list[tuple[str, str]](), ""
    for part in re.split(r"^[ \t]*(#[^\n]*)$", text, flags=re.MULTILINE):
        if part.startswith("#"):
            asked = re.fullmatch(r"#\s*(?:if\s+(?P<macro>\w+)|endif)\s*", part)
            if asked is None or bool(asked["macro"]) == bool(macro):
                raise InvalidArgument(f"the parameters of {about} have {part!r}; allowed are #if NAME and #endif, not nested")
            macro = asked["macro"] or ""
        else:
            pieces += [(piece, macro) for piece in map(str.strip, part.split(",")) if piece]
    return pieces


def _read(piece: str, macro: str, about: str) -> _Declared:
    found = _PIECE.fullmatch(piece)
    kind = found and ("pointer" if "*" in found["pointer"] else _TYPES.get(" ".join(found["type"].split())))
    if found is None or kind is None:
        raise InvalidArgument(f"a parameter of {about} is {piece!r}; allowed are pointers, {', '.join(_TYPES)}")
    return _Declared(found["name"], kind, macro)


def _expanded(text: str, source: Source) -> str:
    """The list with its macros expanded."""
    pieces = text.split(",")
    return ",".join(_defined(piece.strip(), source) if re.fullmatch(r"\s*\w+\s*", piece) else piece for piece in pieces)


def _defined(macro: str, source: Source) -> str:
    definition = re.compile(rf"^[ \t]*#[ \t]*define[ \t]+{macro}[ \t]+((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
    found = (definition.search(path.read_text(encoding="utf-8")) for path, _ in reached(source))
    return next((one[1].replace("\\\n", " ") for one in found if one), macro)
