"""The sources of the kernels for sm_90 of short sequences on a CPU: each form within the error budget, on whole and on partial tiles."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import emulator
import pytest
import torch
from exact.test_short_sm90 import FORMS, case_of, run

from saccade.exact.short import sm90
from saccade.exact.short.config import SM90
from saccade.exact.testing.check import compare
from saccade.testing.inputs import make
from saccade.testing.judge import report


def for_the_emulator(turns: str) -> str:
    """Its two instructions as functions."""
    text = re.sub(r'asm volatile\("st\.shared\.f32[^;]*;"[^;]*;', "at_shared<float>(address) = x;", turns)
    text = re.sub(r'asm volatile\("ld\.shared\.f32[^;]*;"[^;]*;', "x = at_shared<float>(address);", text)
    assert "asm" not in text
    return text


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    folder = tmp_path / "cuda"
    shutil.copytree(sm90._FOLDER, folder)
    turns = folder / "backward_turns_sm90.cu"
    turns.write_text(for_the_emulator(turns.read_text()))

    def launch(self, *tensors):
        built, parameters = self.built, self.built.parameters
        maps = [emulator.tensor_map(*moved.map(tensors[place])) for place, moved in self.moved]
        given = {
            **built.numbers,
            **dict(zip(parameters.pointers, [tensors[place] for place in self.pointers], strict=True)),
            **dict(zip(parameters.maps, maps, strict=True)),
        }
        path = folder / sm90.source(built.form).path.name
        emulator.run(
            SimpleNamespace(
                source=SimpleNamespace(path=path), kernel=built.name, options=built.options, parameters=parameters, arguments=given,
                grid=(self.programs, 1), threads=built.threads,
            )
        )  # fmt: skip

    monkeypatch.setattr(sm90.Sm90Launch, "__call__", launch)
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 1)  # a persistent program takes three problems, or six


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", SM90, ids=str)
def test_budget(emulated, key, form):
    case = replace(case_of(*key, **FORMS[form]), batch=3)
    inputs = make(case, torch.float16, "cpu")
    configs = (SM90[key], None) if key[0] == "fwd" else (None, SM90[key])
    results = compare(case, inputs, run(case, inputs, configs))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("key", [key for key in SM90 if key[0] == "bwd"], ids=str)
def test_an_infinite_key_meets_no_query_that_is_not_there(emulated, key):
    """The zeros in the place of such a query would make its scores NaN."""
    case = replace(case_of(*key, ragged=True), batch=1)
    inputs = make(case, torch.float16, "cpu")
    inputs.query[..., 0].abs_().add_(0.1)
    inputs.key[:, :, 3, 0] = -torch.inf
    assert (run(case, inputs, (None, SM90[key]))["dv"][:, :, 3] == 0).all()
