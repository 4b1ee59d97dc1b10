"""Write the package in the layout of the kernels hub, from where `kernels.get_kernel` loads it under a name of its own.

    python scripts/hub_layout.py OUT
    LOCAL_KERNELS=saccade-org/saccade-flash=OUT python ...

OUT/build/torch-universal/ then holds the package, with its imports of itself made relative, and metadata.json. At the top of the loaded
module stand the functions of flash-attn beside our own. The command line stays behind: it needs the installed package.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "saccade"
VARIANT = Path("build") / "torch-universal"
_LEFT_BEHIND = ("cli", "__main__.py")
_NOT_SOURCE = (".pyc", ".so", ".o")
# the number that users of the hub ask for, raised when the functions at the top change; transformers asks for 1
_VERSION = 1


class NotRelative(ValueError):
    """An import that has no relative form."""


def files_of(package: Path) -> list[Path]:
    """The files of the layout, relative to the package."""
    found = (p.relative_to(package) for p in sorted(package.rglob("*")) if p.is_file())
    return [p for p in found if p.parts[0] not in _LEFT_BEHIND and p.suffix not in _NOT_SOURCE]


def relative_imports(text: str, place: Path, package: str) -> str:
    """The source of the module at `place` in `package` with each absolute import of the package, lazy ones too, made relative.

    Raises:
        NotRelative: `import package`, which binds the name that a copy does not have.
    """
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == package for alias in node.names):
            raise NotRelative(f"{place}:{node.lineno}: {ast.unparse(node)} has no relative form; write from {package} import ...")
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != package:
            continue
        # the number of folders from the module up to the package is that of its parts, for an __init__.py too
        name = "." * len(place.parts) + (node.module or "").partition(".")[2]
        # columns of the syntax tree are bytes
        line = lines[node.lineno - 1].encode()
        before, after = line[: node.col_offset].decode(), line[node.col_offset :].decode()
        changed, found = re.subn(rf"^from\s+{re.escape(node.module or '')}\s+import\b", f"from {name} import", after)
        if not found:
            raise NotRelative(f"{place}:{node.lineno}: the import does not stand on one line up to its names")
        lines[node.lineno - 1] = before + changed
    return "\n".join(lines)


def public_functions(text: str) -> list[str]:
    """The names of the functions that a module defines for others."""
    return [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def contents(package: Path) -> dict[Path, bytes]:
    """The contents of each file of the layout, but metadata.json."""
    found = {}
    for place in files_of(package):
        data = (package / place).read_bytes()
        if place.suffix == ".py":
            data = relative_imports(data.decode(), place, package.name).encode()
        found[place] = data
    names = public_functions((package / "flash_attn_interface.py").read_text(encoding="utf-8"))
    top = found[Path("__init__.py")].decode()
    top += f"\nfrom .flash_attn_interface import {', '.join(names)}  # noqa: E402\n\n__all__ += {names!r}\n"
    found[Path("__init__.py")] = top.encode()
    return found


def metadata_of(files: dict[Path, bytes]) -> dict[str, object]:
    """The metadata that `kernels` reads before it imports. The id is the name of the module in the process: unlike that of any other contents,
    and an identifier, since our ops in torch are registered under it."""
    digest = hashlib.sha256()
    for place, data in sorted(files.items()):
        digest.update(f"{place.as_posix()}\0{len(data)}\0".encode() + data)
    return {
        "name": "saccade",
        "id": f"_saccade_universal_{digest.hexdigest()[:12]}",
        "version": _VERSION,
        "license": "MIT",
        # names outside its own list are refused by `kernels`: torch is implied, and what else we use is optional
        "python-depends": [],
        "backend": {"type": "cuda"},
    }


def write(out: Path, package: Path = PACKAGE) -> Path:
    """Write the layout into `out`, which must be absent or empty; the folder of the variant."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a folder that is empty or does not exist")
    files = contents(package)
    files[Path("metadata.json")] = (json.dumps(metadata_of(files), indent=2) + "\n").encode()
    for place, data in files.items():
        target = out / VARIANT / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return out / VARIANT


def main(arguments: list[str] | None = None) -> int:
    """Write the layout and say how to load it; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, empty or not there yet")
    out = parser.parse_args(arguments).out
    try:
        variant = write(out)
    except (NotRelative, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{variant}\nLOCAL_KERNELS=saccade-org/saccade-flash={out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
