"""The run-time compiler for CUDA C++. It compiles a file of the package to a cubin (with NVRTC, without nvcc), keeps it on disk,
loads it and launches it.

    source = Source(Path(__file__).parent / "cuda" / "forward.cu", headers=(SHARED,))
    kernel = load(source, "forward", Options.of({"HEAD_DIM": 64}), device)
    launch = kernel.configure(grid=(tiles, heads), block=128, shared_bytes=65536)
    launch(query=query.data_ptr(), out=out.data_ptr(), rows=query.shape[0])

It knows nothing of attention. Importing it loads neither cuda-core nor NVRTC.
"""

from saccade.nvrtc.architecture import ARCHITECTURES, architecture_for
from saccade.nvrtc.arguments import Parameters
from saccade.nvrtc.capture import loading_allowed
from saccade.nvrtc.compiler import Options, build, compile_cubin
from saccade.nvrtc.declared import parameters_of
from saccade.nvrtc.kernel import Bound, Kernel, Launch, load, on_current_stream
from saccade.nvrtc.source import Source
from saccade.nvrtc.tensor_map import TensorMap, tensor_map
from saccade.nvrtc.toolchain import give_up, obstacles

__all__ = [
    "ARCHITECTURES",
    "Bound",
    "Kernel",
    "Launch",
    "Options",
    "Parameters",
    "Source",
    "TensorMap",
    "architecture_for",
    "build",
    "compile_cubin",
    "give_up",
    "load",
    "loading_allowed",
    "obstacles",
    "on_current_stream",
    "parameters_of",
    "tensor_map",
]
