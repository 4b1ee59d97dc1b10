"""A first call passes few functions on its way to a kernel, and never comes back to a file that it left."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from saccade.engine import prepare
from saccade.env import interpreting_triton
from tools import walk

interpreted = pytest.mark.skipif(not interpreting_triton(), reason="walks are taken in Triton's interpreter")
MOST_STATIONS = 15


@interpreted
@pytest.mark.parametrize("operation", ["attention", "attention_varlen", "dynamic_mask_attention", "nm_sparse_attention"])
def test_walks_are_short_and_never_climb(operation):
    found = walk.walk(walk.calls()[operation])
    assert found.stations[0].function == operation
    assert found.stations[-1] == walk.LAUNCH
    assert len(found.stations) <= MOST_STATIONS
    assert not found.climbs, found.stations


@pytest.mark.parametrize(("files", "climbs"), [("aabbc", 0), ("abab", 2), ("abca", 1), ("a", 0)])
def test_climbs_are_counted(files, climbs):
    assert walk.Walk([walk.Station(file, "f") for file in files], []).climbs == climbs


@interpreted
def test_sides_are_functions_of_other_files():
    prepare.forget()
    found = walk.walk(walk.calls()["attention"])
    assert walk.Station("exact/prepared.py", "prepare_attention") in found.sides
    assert not set(found.sides) & set(found.stations)
