"""Paper 002, one query (the CLS token): the grid of short_full with Tq = 1."""

from dataclasses import replace

from rows import Writer
from short_common import measure_ours, measure_peers, stream_bandwidth, summary
from tables.short_full import SHAPES


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure ours and the peers, separate inputs."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for shape in (replace(shape, q_len=1) for shape in SHAPES):
        ours = measure_ours(writer, "short_pooling", shape, bandwidth, repeat_ms, False)
        others = measure_peers(writer, "short_pooling", ours["fwd"].problem, shape, repeat_ms, False, with_fa4=False)
        print(summary(shape, False, ours, others), flush=True)
