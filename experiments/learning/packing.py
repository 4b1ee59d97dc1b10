"""The state of `everything.py` as one compressed file, or as parts of it, to go on with on another machine."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from state import State


def pack(state: State, target: Path, part: int, limit: int) -> list[Path]:
    """Write rows, notes, weights that units still begin with and checkpoints. A file of more than `part` bytes is cut into `<target>.00`,
    `<target>.01` and so on; of weights and checkpoints there is as much as fits into `limit` bytes with the rest."""
    state.repair()  # deletes weights that nobody needs
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=1) as archive:
        for path in _chosen(state.root, limit):
            archive.add(path, str(path.relative_to(state.root)))
    whole = held.getvalue()
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in [target, *_parts(target)]:
        old.unlink(missing_ok=True)
    if len(whole) <= part:
        target.write_bytes(whole)
        return [target]
    for number, at in enumerate(range(0, len(whole), part)):
        target.with_name(f"{target.name}.{number:02}").write_bytes(whole[at : at + part])
    return _parts(target)


def unpack(source: Path, root: Path) -> None:
    """The opposite of `pack`; files of the state that the packed one has too are replaced."""
    parts = [source] if source.is_file() else _parts(source)
    if not parts:
        raise ValueError(f"neither {source} nor {source}.00 is there")
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts)), mode="r:gz") as archive:
        archive.extractall(root, filter="data")


def _parts(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f"{target.name}.[0-9][0-9]"))


def _chosen(root: Path, limit: int) -> list[Path]:
    """All rows and notes; then weights before checkpoints, the small ones first, as far as there is room. Examples are drawn again."""
    files = [path for path in sorted(root.rglob("*")) if "drawn" not in path.relative_to(root).parts]
    chosen = [path for path in files if path.suffix in (".csv", ".json")]
    room = limit - sum(path.stat().st_size for path in chosen)
    tensors = [path for path in files if path.suffix == ".pt"]
    for path in sorted(tensors, key=lambda p: (p.parent.name == "checkpoints", p.stat().st_size)):
        if path.stat().st_size <= room:
            room -= path.stat().st_size
            chosen.append(path)
    return chosen
