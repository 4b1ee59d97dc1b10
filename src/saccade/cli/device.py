"""Names of devices and dtypes on the command line."""

from __future__ import annotations

import torch

from saccade.engine.problem import DTYPE_NAMES
from saccade.errors import InvalidArgument

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`."""
    if name not in DTYPES:
        raise InvalidArgument(f"dtype is {name!r}; allowed are {', '.join(DTYPES)}")
    return DTYPES[name]


def device_of(name: str | None) -> torch.device:
    """The device called `name`; without a name the first GPU, or the CPU if there is none."""
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isascii() and index.isdigit())):
        raise InvalidArgument(f"device is {name!r}; allowed are 'cpu', 'cuda' and 'cuda:<index>'")
    if kind == "cpu":
        return torch.device("cpu")
    position, count = int(index or 0), torch.cuda.device_count()
    if position >= count:
        raise InvalidArgument(f"device is {name!r}; torch sees {count} CUDA devices here")
    return torch.device("cuda", position)


def describe(device: torch.device) -> str:
    """A readable line: the GPU's name and compute capability, or the CPU and the number of threads that torch uses."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        return (
            f"{properties.name} (sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {memory:.0f} GiB)"
        )
    threads = torch.get_num_threads()
    return f"{_processor()} ({threads} thread{'s' if threads > 1 else ''})"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    import platform

    return platform.processor() or platform.machine() or "CPU"
