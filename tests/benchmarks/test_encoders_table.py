"""The table of whole encoders runs with tiny models on a CPU, without graphs."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sentence_transformers")
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def _small(case):
    architecture = replace(case.architecture, sizes={**case.architecture.sizes, **TINY})
    peers = tuple(peer for peer in case.peers if peer == "varlen_unpadded")  # a CPU has no graphs, and may have no compiler
    return replace(case, architecture=architecture, batch=4, dtype="float32", peers=peers)


@pytest.fixture
def table(load, monkeypatch):
    import saccade

    module, attention = load("tables.encoders"), load("encoder_attention")
    monkeypatch.setattr(attention, "has_package", lambda name: False)
    monkeypatch.setattr(attention, "torch_packed", saccade.attention_varlen)
    for name, value in {"DEVICE": "cpu", "ROUNDS": 1, "SENTENCES": 12}.items():
        monkeypatch.setattr(module, name, value)
    every = {(case.architecture.name, case.direction, case.passages): _small(case) for case in module.CASES}
    monkeypatch.setattr(module, "CASES", list(every.values()))
    return module


def test_every_kind_of_row(table, tmp_path):
    from rows import Writer

    path = tmp_path / "encoders.csv"
    table.run(Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {r["backend"] for r in rows if r["direction"] == "fwd"} == {"stock", "saccade", "varlen_unpadded"}
    assert {r["backend"] for r in rows if r["direction"] == "fwd+bwd"} == {"stock", "saccade", "saccade_captured"}
    assert len({(r["problem"], r["direction"]) for r in rows}) == len(table.CASES)
    assert all("texts/s" in r["note"] for r in rows)


def test_another_embedding_ends_the_table(table, monkeypatch):
    monkeypatch.setattr(table, "_packed", lambda case, model, batch: torch.randn(len(batch["input_ids"]), 32))
    monkeypatch.setattr(table, "CASES", [case for case in table.CASES if "varlen_unpadded" in case.peers][:1])
    with pytest.raises(SystemExit, match=r"varlen_unpadded of .* a cosine of"):
        table.run(None, 1)
