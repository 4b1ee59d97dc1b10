"""Enough cases of a test marked `sampled` run without a GPU: one in n, and every value of a parameter that has few."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import conftest
import pytest


def items(n: int, **parameters) -> list[SimpleNamespace]:
    """Items as pytest collects them, of one test marked `sampled(n)`."""
    marker = pytest.mark.sampled(n).mark
    found = []
    for values in itertools.product(*parameters.values()):
        params = dict(zip(parameters, values, strict=True))
        nodeid = f"tests/test_x.py::test_y[{'-'.join(map(str, values))}]"
        callspec = SimpleNamespace(params=params)
        found.append(SimpleNamespace(nodeid=nodeid, callspec=callspec, get_closest_marker=lambda name: marker))
    return found


def running(found: list[SimpleNamespace]) -> list[SimpleNamespace]:
    left_out = [item.nodeid for item in conftest._beyond_samples(list(found))]
    return [item for item in found if item.nodeid not in left_out]


def test_one_in_n_of_a_single_parameter():
    assert len(running(items(3, case=range(30)))) == 10
    assert len(running(items(3, case=range(31)))) == 11
    assert len(running(items(50, case=range(3)))) == 1


def test_every_value_of_a_parameter_that_has_few():
    for n in (4, 1000):
        chosen = running(items(n, dtype=["half", "float"], dim=[16, 32, 64, 128], case=range(20)))
        assert {item.callspec.params["dtype"] for item in chosen} == {"half", "float"}
        assert {item.callspec.params["dim"] for item in chosen} == {16, 32, 64, 128}
    assert len(chosen) <= 1 + 1 + 3  # the first, another dtype, three other dims


def test_the_choice_depends_on_names_alone():
    found = items(3, dtype=["half", "float"], case=range(20))
    shuffled = random.Random(1).sample(found, len(found))
    assert [x.nodeid for x in running(found)] == sorted(
        (x.nodeid for x in running(shuffled)), key=[x.nodeid for x in found].index
    )


def test_other_tests_run_whole():
    plain = [SimpleNamespace(nodeid=f"t[{i}]", get_closest_marker=lambda name: None) for i in range(5)]
    assert conftest._beyond_samples(plain) == []
