"""Paper 002, full self-attention: S in {32, 64, 128} x D in {32, 64, 128, 256}, batch 16,000 (8,000 at D = 256), 8 heads, bf16. Rows of
`paper_002` are kernels written from the paper's listing; they are none of the others with which ours are compared."""

from collections.abc import Mapping
from dataclasses import dataclass

from paper_short import paper_attention
from rows import Writer, numbers_of
from short_common import Shape, measure_ours, measure_peers, stream_bandwidth, summary

SHAPES = [Shape(8000 if dim == 256 else 16000, 8, rows, rows, dim) for rows in (32, 64, 128) for dim in (32, 64, 128, 256)]


@dataclass(frozen=True)
class Case:
    """One row of the table. packed: query, key and value are views of one tensor."""

    shape: Shape
    packed: bool

    def __str__(self) -> str:
        return f"{'packed' if self.packed else 'separate'} {self.shape}"


def every_case() -> list[Case]:
    """The rows of the table."""
    return [Case(shape, packed) for packed in (False, True) for shape in SHAPES]


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case."""
    size = numbers_of(row["problem"])
    shape = Shape(size["B"], size["H"], size["Tq"], size["Tk"], size["D"])
    return str(Case(shape, "packed" in row["problem"].split()))


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure ours and the peers, separate and packed inputs."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for case in writer.part.cases(every_case()):
        shape, packed = case.shape, case.packed
        ours = measure_ours(writer, "short_full", shape, bandwidth, repeat_ms, packed)
        others = measure_peers(writer, "short_full", ours["fwd"].problem, shape, repeat_ms, packed)
        written = {"paper_002": paper_attention}
        measure_peers(writer, "short_full", ours["fwd"].problem, shape, repeat_ms, packed, only=written)
        print(summary(shape, packed, ours, others), flush=True)
