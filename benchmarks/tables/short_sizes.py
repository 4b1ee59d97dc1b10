"""From few problems to many: 7 lengths x D = 32 and 64 x 96 to 12,288 problems of 12 heads, bf16, against torch's function: its
own choice (`sdpa`) and each of its backends forced.

Two ways of calling. Eager (no note): the public function, one call after another by the wall clock, so that host time counts
where the device waits for it. In a CUDA graph (note "kernel"): the same calls, 1 to 16 in a graph, replayed, so that it does not.
All take turns, and caches are not flushed. There are 98 shapes, so each time is the median of few and short windows: five eager
and three of replays, each a quarter of `--repeat-ms` and at least three calls. A single row says less than the means at the end.
At `--repeat-ms 15` the table is meant to take at most 200 s.
"""

import functools
import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from peers import SDPA, peers
from rows import Row, Writer, numbers_of
from short_common import Shape
from steps import NOT_RUN, calls_in_a_graph, capture, first_line, repeated, step, those_that_run
from torch import Tensor

import saccade
from saccade.exact.problem import describe_attention
from saccade.testing.timing import Timing, throughput_in_turns

BACKENDS = {"short": "short", "long": "long", "auto": "auto"}  # ours: name in the table -> `backend` of the call
NAMES = (*BACKENDS, "sdpa", *SDPA)
SHORT_UP_TO = 128  # tokens; of longer sequences the kernel is "long"
DIRECTIONS = ("fwd", "fwd+bwd")
HEADS, PROBLEMS = 12, (96, 384, 768, 1536, 3072, 6144, 12288)

SHAPES = [
    Shape(problems // HEADS, HEADS, length, length, dim)
    for length in (32, 50, 64, 77, 128, 197, 257)
    for dim in (32, 64)
    for problems in PROBLEMS
]
ROUNDS, ROUNDS_OF_REPLAYS = 5, 3
LEAST = 0.97  # of torch's speed; below it a row is counted
# what is compared: name -> (note, ours, the others)
COMPARED = {"auto, eager": ("", ("auto",), ("sdpa",)), "kernel, in a graph": ("kernel", ("short", "long"), tuple(SDPA))}

Found = dict[tuple[str, str], dict[str, Timing]]  # (note, direction) -> implementation -> time
Gains = dict[tuple[str, str], float]  # (what is compared, direction) -> how many times as fast


def every_case() -> list[Shape]:
    """The rows of the table."""
    return SHAPES


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case."""
    size = numbers_of(row["problem"])
    return str(Shape(size["B"], size["H"], size["Tq"], size["Tk"], size["D"]))


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, and forward plus backward, of every shape in both ways; at last the summary."""
    found: dict[Shape, Gains] = {}
    for shape in writer.part.cases(every_case()):
        found[shape] = gains_of(_measure(writer, shape, repeat_ms / 4))
        said = ", ".join(f"{what} {direction} x{gain:.2f}" for (what, direction), gain in found[shape].items())
        print(f"{shape}: {said or 'nothing to compare'}", flush=True)
        torch.cuda.empty_cache()
    print("\n".join(summary(found)), flush=True)


def _measure(writer: Writer, shape: Shape, window_ms: float) -> Found:
    leaves, _, dout = shape.leaves()
    calls = those_that_run(writer.part.calls(_calls(shape, leaves)), leaves, dout)
    problem = str(describe_attention(*leaves, None, 0.0, False, None, False, None, False, False, True))
    found: Found = {}
    for note, timed in (("", _eager), ("kernel", _replayed)):
        for direction in DIRECTIONS:
            steps = {name: step(call, direction, leaves, dout) for name, call in calls.items()}
            found[note, direction] = timed(steps, shape, leaves[0].device, window_ms)
            for name, timing in found[note, direction].items():
                writer.add(Row("short_sizes", problem, name, direction, "bf16", *timing, note=note))
    return found


def _calls(shape: Shape, leaves: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Ours by name and by `auto`, torch's own choice, its backends."""
    kernel = "short" if shape.q_len <= SHORT_UP_TO else "long"
    ours = {name: functools.partial(saccade.attention, *leaves, backend=BACKENDS[name]) for name in (kernel, "auto")}
    forced = {name: functools.partial(call, *leaves) for name, call in peers(with_fa4=False).items()}
    return {**ours, "sdpa": functools.partial(F.scaled_dot_product_attention, *leaves), **forced}


def _eager(steps: dict[str, Callable[[], object]], shape: Shape, device: torch.device, window_ms: float) -> dict[str, Timing]:
    return throughput_in_turns(steps, device, ROUNDS, window_ms)


def _replayed(steps: dict[str, Callable[[], object]], shape: Shape, device: torch.device, window_ms: float) -> dict[str, Timing]:
    """Milliseconds of a call in a graph of several."""
    count = calls_in_a_graph(shape.batch * shape.heads * shape.q_len * shape.dim)
    graphs = {}
    for name, call in steps.items():
        try:
            graphs[name] = capture(repeated(call, count))
        except NOT_RUN as error:
            print(f"  {name} is not captured: {first_line(error)}")
    timings = throughput_in_turns(graphs, device, ROUNDS_OF_REPLAYS, window_ms)
    return {name: Timing(*(ms / count for ms in timing)) for name, timing in timings.items()}


def gains_of(found: Found) -> Gains:
    """How many times as fast ours is as the fastest of the others in the same direction, for what is compared and was measured."""
    gains = {}
    for what, (note, ours, others) in COMPARED.items():
        for direction in DIRECTIONS:
            times = {name: timing.p50 for name, timing in found[note, direction].items()}
            mine, theirs = [times[n] for n in ours if n in times], [times[n] for n in others if n in times]
            if mine and theirs:
                gains[what, direction] = min(theirs) / min(mine)
    return gains


def summary(found: dict[Shape, Gains]) -> list[str]:
    """A line for each comparison and direction: the geometric mean, the rows below `LEAST`, the worst."""
    lines = []
    for what, direction in dict.fromkeys(key for gains in found.values() for key in gains):
        values = {shape: gains[what, direction] for shape, gains in found.items() if (what, direction) in gains}
        worst = min(values, key=lambda shape: values[shape])
        below = sum(value < LEAST for value in values.values())
        lines.append(
            f"{what}, {direction}: x{statistics.geometric_mean(values.values()):.2f} on average, {below} of {len(values)} rows below "
            f"{LEAST}, the worst x{values[worst]:.2f} at {worst}"
        )
    return lines
