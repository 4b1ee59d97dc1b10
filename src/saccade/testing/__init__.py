"""Named problems, inputs, the error budget and ahead-of-time compilation: shared by tests, benchmarks and the command line."""

from saccade.testing.budget import Result, check_attention, report
from saccade.testing.budget_dynamic_mask import check_dynamic_mask
from saccade.testing.inputs import Inputs, make
from saccade.testing.inputs_dynamic_mask import DynamicMaskInputs, make_dynamic_mask
from saccade.testing.shapes import ATTENTION, Case, tagged
from saccade.testing.shapes_dynamic_mask import DYNAMIC_MASK, DynamicMaskCase

__all__ = [
    "ATTENTION",
    "DYNAMIC_MASK",
    "Case",
    "DynamicMaskCase",
    "DynamicMaskInputs",
    "Inputs",
    "Result",
    "check_attention",
    "check_dynamic_mask",
    "make",
    "make_dynamic_mask",
    "report",
    "tagged",
]
