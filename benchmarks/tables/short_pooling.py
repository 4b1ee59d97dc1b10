"""Paper 002, one query (the CLS token): the grid of short_full with Tq = 1."""

from collections.abc import Mapping
from dataclasses import replace

from rows import Writer, numbers_of
from short_common import Shape, measure_ours, measure_peers, stream_bandwidth, summary
from tables.short_full import SHAPES


def every_case() -> list[Shape]:
    """The rows of the table."""
    return [replace(shape, q_len=1) for shape in SHAPES]


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case."""
    size = numbers_of(row["problem"])
    return str(Shape(size["B"], size["H"], size["Tq"], size["Tk"], size["D"]))


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure ours and the peers, separate inputs."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for shape in writer.part.cases(every_case()):
        ours = measure_ours(writer, "short_pooling", shape, bandwidth, repeat_ms, False)
        others = measure_peers(writer, "short_pooling", ours["fwd"].problem, shape, repeat_ms, False, with_fa4=False)
        print(summary(shape, False, ours, others), flush=True)
