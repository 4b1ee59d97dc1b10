"""`saccade demo`: shows what this machine has, runs the main job on real input, and a short benchmark."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from saccade.errors import SaccadeError


class Sizes(NamedTuple):
    """How much each part does: sentences that are embedded, and without padding; repeats of these, of attention, and of encoders."""

    sentences: int
    unpadded: int
    passes: int
    attention: int
    encoders: int


# a CPU of two cores takes less than a minute
_GPU, _CPU, _QUICK = Sizes(400, 240, 3, 50, 20), Sizes(128, 64, 1, 3, 1), Sizes(32, 24, 1, 3, 1)


def run(out: Path, quick: bool) -> None:
    """Run every part in order and write the plots into `out`."""
    import time

    from saccade.cli.demo.encoder import check_installed

    # checked now, not after a minute of work
    _check_writable(out)
    check_installed()

    from rich.console import Console

    from saccade.cli.demo import benchmark, cls_only, dynamic, embedding, interpreter, plots, unpadded
    from saccade.cli.device import device_of
    from saccade.cli.info import backends_table, collect
    from saccade.hardware import has_package

    started, console, device = time.monotonic(), Console(), device_of(None)
    on_gpu = device.type == "cuda"
    sizes = _QUICK if quick else _GPU if on_gpu else _CPU
    console.rule("The main job: sentences to embeddings")
    outcomes = embedding.run(console, device, sizes.sentences, sizes.passes)
    console.rule("The main job without padding")
    unpadded_rows = unpadded.run(console, device, sizes.unpadded, sizes.passes)
    console.rule("Dynamic masks against torch")
    dynamic_rows = dynamic.run(console, device, quick or not on_gpu)
    console.rule("Attention against torch")
    measured = benchmark.run(console, device, sizes.attention)
    if not on_gpu:
        console.print(
            "Near 1 is right here: both run torch's kernel, saccade after a few microseconds of checks. Its own kernels need a GPU."
        )
    console.rule("Reading only the CLS token")
    cls_rows = cls_only.run(console, device, sizes.encoders)
    console.rule("This machine")
    console.print(backends_table(collect()["devices"]))
    if not on_gpu:
        console.print(
            "There is no CUDA GPU here: everything above ran on the CPU, where saccade.attention calls torch's own function."
        )
        with console.status("running the Triton kernels in the interpreter"):
            found = interpreter.sentences()
        console.print("\n".join(found), highlight=False)
    if has_package("matplotlib"):
        for path in plots.save(out, device, outcomes, unpadded_rows, dynamic_rows, measured, cls_rows):
            console.print(f"wrote {path}", highlight=False)
    else:
        console.print("no plots: pip install 'saccade-attention[demo]'", style="yellow", markup=False)
    console.print(f"done in {time.monotonic() - started:.0f} s")


def _check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SaccadeError(
            f"out is {str(out)!r}, where no plots can be written ({error.strerror}); give another folder"
        ) from None
