"""The table of CLS-only last layers against the depth of the encoder: its predictions, its checks, and the table on a CPU."""

from __future__ import annotations

import csv
import importlib
import math
import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from saccade.testing.timing import Timing

pytest.importorskip("transformers")
TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture
def table(load, monkeypatch):
    """The table on the CPU, with tiny models of at most three layers."""
    module = load("tables.pooled_depth")
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32, "ROUNDS": 1, "DEPTHS": (1, 2, 3), "CHECKED": 3}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "MODELS", [small(model) for model in module.MODELS])
    return module


def small(model):
    sizes = {**model.architecture.sizes, **TINY}
    if model.architecture.is_text:
        return replace(model, architecture=replace(model.architecture, sizes=sizes), batch=5, tokens=24)
    return replace(model, architecture=replace(model.architecture, sizes={**sizes, "image_size": 48}), batch=5, tokens=10)


def rows_of(load, table, path):
    table.run(load("rows").Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_the_table_on_a_cpu(load, table, tmp_path, capsys):
    path = tmp_path / "pooled_depth.csv"
    rows = rows_of(load, table, path)
    found = {(r["problem"], r["direction"], r["backend"]): r for r in rows}
    assert len(found) == len(rows) == 2 * 2 * 3 * 4
    for model in table.MODELS:
        for direction in ("fwd", "fwd+bwd"):
            for depth in (1, 2, 3):
                of = {name: found[model.described(depth), direction, name] for name in _names()}
                assert of["stock"]["error_ratio"] == ""
                assert all(0 <= float(of[name]["error_ratio"]) < 1 for name in of if name != "stock")
                for whole in ("stock", "saccade"):
                    gain = float(of[whole]["ms_p50"]) / float(of[f"{whole}_cls_only"]["ms_p50"])
                    said = re.search(rf"x([\d.]+) of {whole}, x([\d.]+) predicted", of[f"{whole}_cls_only"]["note"])
                    assert float(said[1]) == pytest.approx(gain, rel=5e-3)
                    assert "predicted" not in of[whole]["note"]
    assert capsys.readouterr().out.count("_cls_only: ") == len(rows) // 2

    points = load("plot_lines").points_of(rows)
    assert len(points) == 2 * 2 * 2
    assert all([depth for depth, *_ in found] == [1, 2, 3] for found in points.values())
    pytest.importorskip("matplotlib")
    written = load("plot").draw(path)
    assert [p.name for p in written] == ["pooled_depth.png", "pooled_depth.dark.png"]
    assert min(p.stat().st_size for p in written) > 8_000


def _names():
    return ("stock", "stock_cls_only", "saccade", "saccade_cls_only")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_predicted_share_is_that_of_the_multiplications(load, table, index, depth):
    """Counted by torch, in the encoder as it runs."""
    from saccade.integrations.pooled import cls_only

    load("encoder_attention").register_all()
    model = table.MODELS[index]
    encoder = model.of_depth(depth).make("cpu", torch.float32).under("eager")
    alone = encoder.under("eager")
    (saved,) = cls_only(alone.model).saved(model.tokens).values()
    batch = model.inputs(2)
    counts = [_layers_flops(some, batch) for some in (encoder, alone)]
    assert counts[0] / counts[1] == pytest.approx(table.by_multiplications(saved, depth), rel=1e-3)
    assert counts[0] / counts[1] > 1 + 0.2 / depth


def _layers_flops(encoder, batch) -> int:
    """Without the projection of patches, which is a convolution; the head is not in `Encoder.forward`."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(batch.padded)
    every = counter.get_flop_counts()["Global"]
    return sum(count for op, count in every.items() if "convolution" not in str(op))


def test_predictions_of_known_times(load):
    table = load("tables.pooled_depth")
    assert table.by_multiplications(0.5, 1) == 2
    assert table.by_multiplications(0.5, 12) == pytest.approx(24 / 23)
    # 2 ms beside the layers, and 3 for each; half of one is saved
    found = table.by_time(0.5, {depth: 2 + 3.0 * depth for depth in (1, 2, 4)})
    assert found == pytest.approx({1: 5 / 3.5, 2: 8 / 6.5, 4: 14 / 12.5})
    assert all(found[depth] < table.by_multiplications(0.5, depth) for depth in found)


def test_times_that_scatter_predict_nothing_and_keep_their_row(load):
    """The slope of 1, 1 and 9 ms is 4 ms a layer, of which 0.4 would be more than the 1 ms of one layer."""
    found = load("tables.pooled_depth").by_time(0.4, {1: 1.0, 2: 1.0, 3: 9.0})
    assert math.isnan(found[1])
    assert math.isnan(found[2])
    assert found[3] == pytest.approx(1 / (1 - 1.6 / 9))
    row = {"problem": "BERT L=1", "direction": "fwd", "backend": "saccade_cls_only"}
    note = f"5 items/s; x1.500 of saccade, x1.400 predicted by multiplications, x{found[1]:.3f} by time"
    (points,) = load("plot_lines").points_of([row | {"note": note}]).values()
    assert points == [(1, 1.5)]


def test_the_pooled_token_of_another_item_is_never_timed(load, table, monkeypatch, tmp_path):
    module = importlib.import_module("saccade.integrations.transformers")
    before = module.attention

    def wrong(query, key, value, *others, **named):
        return before(query, key, value.roll(1, 0), *others, **named)

    monkeypatch.setattr(module, "attention", wrong)
    monkeypatch.setattr(table, "throughput_in_turns", lambda *given: pytest.fail("it was timed"))
    with pytest.raises(load("encoder_check").Disagreement, match="saccade differs from stock"):
        rows_of(load, table, tmp_path / "pooled_depth.csv")


def test_every_token_but_the_first_is_a_wrong_pooled_token(load, table, monkeypatch, tmp_path):
    """`cls_only` alone is broken: the whole layer stays right."""
    layers = importlib.import_module("saccade.integrations.pooled_layers")
    pooled = importlib.import_module("saccade.integrations.pooled")
    family = pooled._ENCODERS["BertModel"][1]

    def second(layer, hidden, *others, **named):
        return layers.bert_forward(layer, hidden.roll(1, 1), *others, **named)

    monkeypatch.setitem(pooled._ENCODERS, "BertModel", ("encoder.layer", replace(family, forward=second)))
    monkeypatch.setattr(table, "throughput_in_turns", lambda *given: pytest.fail("it was timed"))
    with pytest.raises(load("encoder_check").Disagreement, match="stock_cls_only differs from stock"):
        rows_of(load, table, tmp_path / "pooled_depth.csv")


def test_rows_are_of_the_times(load, table, tmp_path, monkeypatch):
    """With times that are given, so that the written gains can be told; of one model at two depths."""
    monkeypatch.setattr(table, "MODELS", table.MODELS[:1])
    monkeypatch.setattr(table, "DEPTHS", (1, 2))

    def given(calls, device, rounds, window_ms):
        for call in calls.values():
            call()
        return {name: Timing(ms, ms, ms) for name, ms in zip(_names(), (8.0, 5.0, 6.0, 4.0), strict=True)}

    monkeypatch.setattr(table, "throughput_in_turns", given)
    rows = rows_of(load, table, tmp_path / "pooled_depth.csv")
    notes = [r["note"] for r in rows if r["backend"] == "saccade_cls_only"]
    assert all(note.startswith("1250 items/s; x1.500 of saccade, x") for note in notes)
    # no layer takes time where every depth takes the same
    assert all(note.endswith("x1.000 by time") for note in notes)


def test_the_depths_are_those_of_the_paper_s_kind_of_encoder(load):
    table = load("tables.pooled_depth")
    assert tuple(table.DEPTHS) == tuple(range(1, 13))
    assert [model.described(12) for model in table.MODELS] == ["BERT-base L=12 B=256 S=128", "ViT-B/16 L=12 B=128 S=197"]
