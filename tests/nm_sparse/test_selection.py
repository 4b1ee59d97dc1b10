"""The selection of the fused kernels, on a CPU: the instructions of `selection.cuh` are parsed and executed, and the metadata and
bits made from their codes are checked."""

from __future__ import annotations

import itertools
import math
import operator
import re
from types import SimpleNamespace

import emulator
import pytest
import torch
from parameter_lists import listed

from saccade.nm_sparse.fused import config as fused_config
from saccade.nm_sparse.fused import launchers as fused

FOLDER = fused.SM80.path.parent
TEXT = (FOLDER / "selection.cuh").read_text()
CASES = {"gt": operator.gt, "ge": operator.ge}


def extreme(take, a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else take(a, b)


class Asm:
    """An asm statement of `selection.cuh`: its lines and its operands."""

    def __init__(self, name: str):
        body = re.search(rf"void {name}\(.*?asm\((.*?)\);\n}}", TEXT, re.DOTALL).group(1)
        self.lines = [
            re.sub(r"[{};]", "", line).strip() for line in re.findall(r'"(.*?)\\n"|"([^"\\]*}) ?"', body) for line in line if line
        ]
        self.operands = re.findall(r'"[=+&]*f"\(([^()]+)\)', body)
        assert len(self.lines) > 3
        assert len(self.operands) > 6

    def run(self, **known: float) -> dict[str, float]:
        values = {f"%{i}": eval(re.sub(r"(\d)f", r"\1", text), {}, known) for i, text in enumerate(self.operands)}
        for line in self.lines:
            if not line.startswith(".reg"):
                self._step(line, values)
        return {text: values[f"%{i}"] for i, text in enumerate(self.operands[:3])}

    @staticmethod
    def _step(line: str, values: dict[str, float]) -> None:
        guard, operation, rest = re.fullmatch(r"(?:@(\w+) )?([\w.]+) (.*)", line).groups()
        if guard and not values[guard]:
            return
        to, *names = rest.split(", ")
        given = [(not values[n[1:]]) if n[0] == "!" else 4.0 if n == "0f40800000" else values[n] for n in names]
        kind, *words = operation.split(".")
        if kind in ("max", "min"):
            values[to] = extreme(max if kind == "max" else min, *given)
        elif kind in ("set", "setp"):
            holds = CASES[words[0]](*given[:2])
            first, _, second = to.partition("|")
            values[first] = holds and (len(given) < 3 or given[2])
            if second:
                values[second] = not holds and given[2]
        else:
            values[to] = {"fma": lambda a, b, c: a * b + c, "add": operator.add}[kind](*given)


def kept_of(scores, keep: int) -> set[int]:
    """The largest score; of two equal ones the lower key; a NaN in a pair is propagated."""
    pairs = [range(4)] if keep == 2 else [range(2), range(2, 4)]
    return {i for pair in pairs for i in sorted(pair, key=lambda i: (-scores[i], i))[:keep]}


@pytest.mark.parametrize("name", ["select_override", "select_early", "select_unordered", "select_pairs"])
@pytest.mark.parametrize("unit", [1, 4096, 65536])
def test_every_order_of_four(name, unit):
    """All ties and orders: the kept, each beside its key."""
    asm, keep = Asm(name), 1 if name == "select_pairs" else 2
    begins_with_8 = name in ("select_unordered", "select_pairs")
    for scores in itertools.product(range(4), repeat=4):
        before = 2.0**23 + (8 * unit if begins_with_8 else 0)
        found = asm.run(
            **dict(zip("abcd", scores, strict=True)), scale=2.0, offset=-5.0, unit=unit, before=before, codes=before, x=0, y=0
        )
        code = (found["codes"] - 2.0**23) / unit
        assert code == int(code)
        places = int(code) % 4, int(code) // 4
        assert places[0] != places[1]
        assert set(places) == kept_of(scores, keep)
        assert name == "select_unordered" or places[0] < places[1]
        if name != "select_pairs":  # whose exponents are made outside
            assert [found["x"], found["y"]] == [2 * scores[i] - 5 for i in places]


@pytest.mark.parametrize("place", range(4))
def test_a_nan_goes_on(place):
    for scores in itertools.product((-math.inf, 0.0, 1.0, 2.0), repeat=4):
        given = [math.nan if i == place else score for i, score in enumerate(scores)]
        found = Asm("select_unordered").run(
            **dict(zip("abcd", given, strict=True)), scale=1.0, offset=0.0, unit=1, codes=2.0**23 + 8, x=0, y=0
        )
        assert math.isnan(found["x"] + found["y"])
        assert int(found["codes"] - 2.0**23) not in (0, 5, 10, 15)  # invalid as metadata


SHARE = """
float max_nan(float a, float b);
#include "metadata.cuh"
extern "C" void share(const float* codes, unsigned* metadata, unsigned* bits) {
    int lane = threadIdx.x;
    float own[2] = {codes[lane], codes[32 + lane]};
    metadata[lane] = share_metadata_of_two(own, lane % 4);
    bits[lane] = selection_bits(metadata[lane], lane % 4);
}
"""


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("selection", ["SELECT_UNORDERED", "SELECT_EARLY"])
def test_metadata_of_two_times_16_rows(tmp_path, selection):
    """Codes of two row blocks, shared: each word where the product takes it, and the bits of the stored selection."""
    for name in ("metadata.cuh", "selection.cuh"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "share.cu").write_text(SHARE)
    legal = [p + 4 * q for p in range(4) for q in range(4) if p < q or (p > q and selection == "SELECT_UNORDERED")]
    torch.manual_seed(0)
    digits = torch.tensor(legal)[torch.randint(len(legal), (2, 2, 2, 8, 4))]  # row block, h, q, g, t
    weights = 16 ** (torch.arange(2) + 2 * torch.arange(2)[:, None])  # h, q
    codes = ((digits * weights[..., None, None]).sum((1, 2)) + 2**23).float().reshape(2, 32)
    metadata, bits = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    defines = (("PARTS", "2"), ("PAIRS", "0"), ("SELECTION", str(getattr(fused_config, selection))))
    emulator.run(
        SimpleNamespace(
            source=SimpleNamespace(path=tmp_path / "share.cu"), kernel="share", options=SimpleNamespace(defines=defines), grid=(1, 1),
            threads=32, parameters=listed("pointer codes, pointer metadata, pointer bits"),
            arguments={"codes": codes, "metadata": metadata, "bits": bits},
        )
    )  # fmt: skip
    for g, t in itertools.product(range(8), range(4)):
        word = sum(int(digits[t // 2, h, t % 2, g, s]) << (16 * h + 4 * s) for h in range(2) for s in range(4))
        assert metadata[4 * g + t].item() & 0xFFFFFFFF == word
        # of 32 keys of row g + 8 (t % 2) of row block t // 2
        kept = 0
        for q, s in itertools.product(range(2), range(4)):
            digit = int(digits[t // 2, t % 2, q, g, s])
            kept |= (1 << digit % 4 | 1 << digit // 4) << (16 * q + 4 * s)
        assert bits[4 * g + t].item() & 0xFFFFFFFF == kept
