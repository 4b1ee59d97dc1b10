"""Named problems, inputs, the error budget and ahead-of-time compilation: shared by tests, benchmarks and the command line."""

from saccade.testing.budget import Result, check_attention, report
from saccade.testing.budget_dynamic_mask import check_dynamic_mask
from saccade.testing.budget_nm_sparse import check_nm_sparse
from saccade.testing.inputs import Inputs, make
from saccade.testing.inputs_dynamic_mask import DynamicMaskInputs, make_dynamic_mask
from saccade.testing.inputs_nm_sparse import make_nm_sparse
from saccade.testing.shapes import ATTENTION, Case, tagged
from saccade.testing.shapes_dynamic_mask import DYNAMIC_MASK, DynamicMaskCase
from saccade.testing.shapes_nm_sparse import NM_SPARSE, NMSparseCase

__all__ = [
    "ATTENTION",
    "DYNAMIC_MASK",
    "NM_SPARSE",
    "Case",
    "DynamicMaskCase",
    "DynamicMaskInputs",
    "Inputs",
    "NMSparseCase",
    "Result",
    "check_attention",
    "check_dynamic_mask",
    "check_nm_sparse",
    "make",
    "make_dynamic_mask",
    "make_nm_sparse",
    "report",
    "tagged",
]
