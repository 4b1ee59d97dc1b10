"""Kernel files by their names, and the tests and the timed problems of each family."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from saccade.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "saccade"


class Family(NamedTuple):
    """A family of kernels.

    tests: files under `tests`, or patterns of them. problems: what is timed on a GPU, as (operation, backend, B, H, Tq, Tk, D).
    together: whether one test compiles several sources; else a test that compiles another source than the kernel's is skipped there.
    """

    tests: tuple[str, ...]
    problems: tuple[tuple[str, str, int, int, int, int, int], ...]
    together: bool = False


_BINARIES = "launch/test_binaries.py"  # of sources that have no larger test without a GPU
_GATHERED = ("dynamic_mask_attention", "gather", 1, 8, 8192, 8192, 64)
_MASKED = ("nm_sparse_attention", "masked", 4, 8, 1024, 1024, 64)
# the beginning of a kernel's name -> its family; the longest beginning counts
FAMILIES = {
    "exact/short": Family(
        ("exact/test_short.py", "exact/test_short_sm90.py"),
        (("attention", "short", 1024, 12, 128, 128, 64), ("attention", "short", 4096, 12, 1, 128, 64)),
    ),
    "exact/ragged": Family(
        ("exact/test_ragged.py", "exact/test_varlen.py", "exact/test_tokens.py", "exact/test_tokens_emulated.py", _BINARIES),
        (("attention", "ragged", 256, 12, 128, 128, 64), ("attention_varlen", "ragged", 1024, 12, 100, 100, 64)),
    ),
    "exact/long": Family(
        ("exact/test_long.py", "exact/test_long_emulated.py", _BINARIES), (("attention", "long", 128, 12, 197, 197, 64),)
    ),
    "exact/shared_bias": Family(("exact/test_shared_bias.py",), ()),
    "exact/varlen": Family(("exact/test_varlen.py",), (("attention_varlen", "flash", 64, 12, 700, 700, 64),)),
    "exact/volta": Family(("exact/test_volta.py",), (("attention", "volta", 4, 16, 1024, 1024, 64),), together=True),
    "dynamic_mask": Family(("dynamic_mask/test_*.py",), (_GATHERED,)),
    "dynamic_mask/gather": Family(("dynamic_mask/test_gather*.py",), (_GATHERED,)),
    "dynamic_mask/selection": Family(
        ("dynamic_mask/test_expiry.py", "dynamic_mask/test_lists.py", "dynamic_mask/test_offers.py"), (_GATHERED,)
    ),
    "dynamic_mask/decode": Family(
        ("dynamic_mask/test_decode.py",), (("dynamic_mask_cache", "decode", 1, 8, 1, 1024, 64),)
    ),
    "dynamic_mask/scores": Family(("dynamic_mask/test_scores.py",), ()),
    "nm_sparse": Family(
        ("nm_sparse/test_query_bits.py", "nm_sparse/test_dense_keys.py", "nm_sparse/test_fused*.py", _BINARIES), (_MASKED,)
    ),
    "nm_sparse/masked": Family(("nm_sparse/test_masked.py", "nm_sparse/test_dense_keys.py"), (_MASKED,)),
    "nm_sparse/fused": Family(
        ("nm_sparse/test_fused*.py", _BINARIES), (("nm_sparse_attention", "mma_sp", 4, 8, 4096, 4096, 64),)
    ),
    "nm_sparse/backward_sm90": Family(
        ("nm_sparse/test_backward_sm90*.py",), (("nm_sparse_attention", "mma_sp", 4, 8, 4096, 4096, 64),), together=True
    ),
    "nm_sparse/staged": Family(("nm_sparse/test_staged.py",), (), together=True),
    "launch": Family(("nm_sparse/test_masked.py", "exact/test_ragged.py", "dynamic_mask/test_gather.py"), (_GATHERED, _MASKED)),
}  # fmt: skip


def kernels() -> dict[str, Path]:
    """The name of every kernel -> its file: a CUDA source, or a module with Triton functions."""
    found = [*SRC.rglob("*.cu"), *(path for path in SRC.rglob("*.py") if "\n@triton.jit" in path.read_text(encoding="utf-8"))]
    named = {path.relative_to(SRC).with_suffix("").as_posix(): path for path in found}
    return dict(sorted(named.items()))


def file_of(name: str) -> Path:
    """The file of a kernel. Its name may leave `cuda/` out where that is no other's name.

    Raises:
        InvalidArgument: no kernel has that name.
    """
    every = kernels()
    plain = name.removeprefix("src/saccade/").removesuffix(".py").removesuffix(".cu")
    shorter = {full.replace("/cuda/", "/"): path for full, path in every.items()}
    if plain not in every and plain not in shorter:
        raise InvalidArgument(f"K is {name!r}; allowed are {', '.join(every)}")
    return every.get(plain) or shorter[plain]


def family_of(path: Path) -> Family:
    """The family of a kernel file."""
    name = path.relative_to(SRC).as_posix().replace("/cuda/", "/")
    return FAMILIES[max((start for start in FAMILIES if name.startswith(start)), key=len)]


def tests_of(family: Family) -> list[str]:
    """The test files of a family, relative to the checkout."""
    tests = ROOT / "tests"
    return [path.relative_to(ROOT).as_posix() for pattern in family.tests for path in sorted(tests.glob(pattern))]
