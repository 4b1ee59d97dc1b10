"""Named problems, inputs, the error budget and ahead-of-time compilation: shared by tests, benchmarks and the command line."""

from saccade.testing.budget import Result, check_attention, report
from saccade.testing.inputs import Inputs, make
from saccade.testing.shapes import ATTENTION, Case, tagged

__all__ = ["ATTENTION", "Case", "Inputs", "Result", "check_attention", "make", "report", "tagged"]
