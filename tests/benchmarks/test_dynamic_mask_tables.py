"""The tables of dynamic masks on a CPU, tiny: what their calls compute, what their notes count, and that their rows are written and
drawn."""

from __future__ import annotations

import csv
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.testing.timing import Timing, measure


def rows_of(table, load, path):
    table.run(load("rows").Writer(path, {"gpu": "none", "torch": "x", "date": "x"}), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def in_turn(calls, repeat_ms):
    return {name: measure(call, "cpu", repeat_ms=repeat_ms) for name, call in calls.items()}


HISTORIES = {1: (32, 64), 3: (64,)}


class TestDecode:
    @pytest.fixture
    def table(self, load, monkeypatch):
        module = load("tables.dynamic_mask_decode")
        small = {"DEVICE": "cpu", "BACKEND": "auto", "HEADS": 4, "KV_HEADS": 2, "DIM": 16, "HISTORIES": HISTORIES}
        small |= {"KEEPS": (8, 16), "STEPS": 3, "HOST_CALLS": 3}
        for name, value in small.items():
            monkeypatch.setattr(module, name, value)
        for name in ("graph_ms", "host_ms"):
            monkeypatch.setattr(module, name, lambda steps, count: (steps(), Timing(1.0, 1.0, 1.0))[1])
        return module

    def test_its_rows(self, table, load, tmp_path):
        rows = rows_of(table, load, tmp_path / "dynamic_mask_decode.csv")
        device = [r for r in rows if r["note"] != "host"]
        assert len(device) * 2 == len(rows)
        seen = {(r["backend"], *map(int, re.findall(r"\b(?:B|Tk)=(\d+)", r["problem"]))) for r in device}
        settings = {(batch, history) for batch, histories in HISTORIES.items() for history in histories}
        # torch's flash backend runs on a CPU
        assert seen == {(name, *setting) for name in ("decode", "decode_sampled", "sdpa_flash") for setting in settings}
        for row in device:
            sizes = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", row["problem"])}
            keys, dense = 2 * sizes["B"] * 2 * 16, sizes["Tk"]
            if row["backend"].startswith("decode"):
                held, whole = map(int, re.fullmatch(r"cache (\d+) bytes, dense (\d+) bytes", row["note"]).groups())
                # K and V in bf16, a score and a position
                assert held == sizes["keep"] * (2 * keys + sizes["B"] * 2 * 8)
                assert whole == dense * 2 * keys
                assert float(row["error_ratio"]) <= 1
                assert float(row["roof_ms"]) == pytest.approx(2 * keys * sizes["keep"] / 4.8e9, rel=1e-3)
            else:
                assert row["note"] == f"cache {dense * 2 * keys} bytes"
                assert float(row["roof_ms"]) == pytest.approx(2 * keys * dense / 4.8e9, rel=1e-3)

    def test_dense_calls_are_attention_over_the_whole_history(self, table):
        query = torch.randn(3, 4, 1, 16)
        key, value = torch.randn(2, 3, 2, 64, 16).unbind(0)
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        for how, call in table.dense_calls(query, key, value).items():
            torch.testing.assert_close(call().reshape(expected.shape), expected, msg=how)

    def test_scores_are_given_or_made_of_the_value(self, table):
        token = table.Token(*torch.randn(2, 3, 2, 1, 16).unbind(0), torch.randn(3, 2, 1))
        ways = table.ways_of_scores(token.key)
        assert ways["decode"](token) is token.scores
        made = ways["decode_sampled"](token)
        assert made.shape == token.scores.shape
        assert not torch.equal(made, ways["decode_sampled"](token._replace(value=-token.value)))
        assert torch.equal(made, ways["decode_sampled"](token._replace(key=-token.key, scores=-token.scores)))

    def test_a_wrong_result_is_seen(self, table):
        key, value = torch.randn(2, 3, 2, 64, 16).bfloat16().unbind(0)
        scores, query = torch.randn(3, 2, 64), torch.randn(3, 4, 1, 16).bfloat16()
        token = key[:, :, :1], value[:, :, :1], scores[:, :, :1]
        assert table.error_ratio(table.filled(key, value, scores, 8), query, *token, keep=8) <= 1
        assert table.error_ratio(table.filled(key, -value, scores, 8), query, *token, keep=9) > 1

    def test_its_plot_has_only_shapes_with_several_lengths(self, table, load, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        path = tmp_path / "dynamic_mask_decode.csv"
        rows_of(table, load, path)
        drawn, lengths = [], load("plot_lines")
        draw = lengths._mask_lines
        monkeypatch.setattr(lengths, "_mask_lines", lambda axis, rows: (drawn.extend(rows), draw(axis, rows)))
        assert [p.name for p in load("plot").draw(path)] == ["dynamic_mask_decode.png", "dynamic_mask_decode.dark.png"]
        assert {lengths._shape(r) for r in drawn} == {"B=1 H=4 Hkv=2 D=16"}


class TestLength:
    @pytest.fixture
    def table(self, load, monkeypatch):
        module = load("tables.dynamic_mask_length")
        settings = [module.Setting(n, 8, 4, 2, 16) for n in (32, 64)]
        given = {"DEVICE": "cpu", "BACKEND": "gather_torch", "SETTINGS": settings, "MASK_LENGTHS": ()}
        given["measure_in_turns"] = lambda calls, rounds, repeat_ms: (turns.append(set(calls)), in_turn(calls, repeat_ms))[1]
        module.turns = turns = []
        for name, value in given.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(load("tables.dynamic_mask_sampling"), "DEVICE", "cpu")
        monkeypatch.setattr(module, "_peak_of", lambda call, inputs: 0.5)
        return module

    def test_ours_with_the_sampling_step_takes_turns_with_ours_without(self, table, load, tmp_path, monkeypatch):
        settings = [*table.SETTINGS, table.Setting(64, 8, 4, 2, 16, "local")]
        monkeypatch.setattr(table, "SETTINGS", settings)
        rows = rows_of(table, load, tmp_path / "dynamic_mask_length.csv")
        sampled = {(r["problem"], r["direction"]) for r in rows if r["backend"] == "gather_sampled"}
        assert sampled == {(str(setting), d) for setting in settings[:2] for d in ("fwd", "bwd")}
        assert len(table.turns) == 2 * 2  # lengths, directions
        assert all(any(c.startswith("gather dynamic") for c in calls) for calls in table.turns)
        assert all(any(c.startswith("gather_sampled") for c in calls) for calls in table.turns)
        assert {table.case_of(row) for row in rows} == {str(case) for case in table.every_case()}

    def test_the_sampling_step_is_in_both_directions(self, table):
        setting = table.SETTINGS[0]
        sampled = table._sampled(setting)
        query, key, value, weight, A = sampled.leaves
        scores = saccade.dynamic_mask_scores(value, weight, A).detach()
        with torch.no_grad():
            expected = saccade.dynamic_mask_attention(query, key, value, scores, keep=8, enable_gqa=True)
        torch.testing.assert_close(sampled.call(), expected)
        again = table._again_and_again(sampled)
        grads = again()
        assert all(torch.equal(a, b) for a, b in zip(grads, again(), strict=True))
        assert [g.shape for g in grads] == [x.shape for x in sampled.leaves]
        assert all(g.abs().max() > 0 for g in grads)

    def test_ours_takes_turns_with_those_that_take_the_mask(self, table, load, tmp_path, monkeypatch):
        given = {"MASK_LENGTHS": (32,), "MASK_KEEP": 8, "SETTINGS": [table.Setting(32, 8, 4, 2, 128)]}
        for name, value in given.items():
            monkeypatch.setattr(table, name, value)
        monkeypatch.setattr(table, "_flex", lambda writer, setting, repeat_ms: [])
        monkeypatch.setattr(table, "_sdpa_mask", lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias))
        rows = rows_of(table, load, tmp_path / "dynamic_mask_length.csv")
        beside = [r for r in rows if table.case_of(r).endswith(" masks")]
        assert {r["backend"] for r in beside} == {"gather_beside_masks", "sdpa_mask"}
        assert [len(calls) for calls in table.turns[-2:]] == [2, 2]
        (note,) = {r["note"] for r in beside if r["backend"] == "sdpa_mask" and r["direction"] == "fwd"}
        difference = float(re.search(r"([\d.e-]+) from ours", note)[1])
        assert difference < 0.1

    def test_chosen_implementations(self, table, load, tmp_path):
        parts = load("parts")
        writer = load("rows").Writer(tmp_path / "x.csv", {}, parts.Part(backends=["gather_sampled"]))
        table.run(writer, 1)
        assert {row.backend for row in writer.rows} == {"gather_sampled"}

    def test_gains_over_the_authors_kernel_are_of_turns(self, load, monkeypatch):
        """Ours of another run does not count."""
        evidence = load("evidence")
        rows = [{"problem": "p", "direction": d, "backend": b, "ms_p50": ms, "note": ""}
                for d in ("fwd", "bwd") for b, ms in (("gather", "1.0"), ("gather_beside_masks", "2.0"), ("fsa", "6.0"))]  # fmt: skip
        monkeypatch.setattr(evidence, "rows", lambda name: rows)
        assert evidence.authors() == ["3.0"] * 2

    def test_a_forward_row_has_the_peak_of_forward(self, table, load, tmp_path, monkeypatch):
        peaks = {"fwd": 1.25, "bwd": 2.5}
        with_gradient = []

        def peak(call, inputs):
            before = len(with_gradient)
            call()
            return peaks["bwd" if len(with_gradient) > before else "fwd"], inputs

        grad = torch.autograd.grad
        monkeypatch.setattr(torch.autograd, "grad", lambda *given, **more: (with_gradient.append(1), grad(*given, **more))[1])
        counted = []
        monkeypatch.setattr(table, "_peak_of", lambda call, inputs: (lambda p: (counted.append(p), p[0])[1])(peak(call, inputs)))
        rows = rows_of(table, load, tmp_path / "dynamic_mask_length.csv")
        assert {r["backend"] for r in rows} == {"gather", "gather_sampled", "sdpa_flash"}
        assert all(f"peak {peaks[r['direction']]:.3f} GiB" in r["note"] for r in rows)
        # backward has the gradient of the output as an input besides
        ours = [sum(x.numel() for x in inputs) for _, inputs in counted[:2]]
        assert ours[1] - ours[0] == 4 * 32 * 16

    def test_peaks_are_beside_what_was_there(self, load, monkeypatch):
        peak_of = load("tables.dynamic_mask_length")._peak_of
        held = {"now": 3 * 2**30, "most": 0}
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(most=held["now"]))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["most"])
        inputs = [torch.empty(2**20, device="meta"), torch.empty(2**20, device="meta", dtype=torch.bfloat16)]
        found = peak_of(lambda: held.update(most=held["now"] + 2**29), inputs)
        assert found == pytest.approx(0.5 + 6 / 2**10)


class TestDocuments:
    @pytest.fixture
    def table(self, load, monkeypatch):
        module = load("tables.dynamic_mask_documents")
        given = {"DEVICE": "cpu", "BACKEND": "gather_torch", "SETTING": module.Setting(120, 6, 8, 4, 2, 16), "in_turn": in_turn}
        for name, value in given.items():
            monkeypatch.setattr(module, name, value)
        return module

    def test_its_calls(self, table):
        """Each document by itself."""
        setting = table.SETTING
        leaves, _ = table._leaves(setting)
        for case in table.cases(setting):
            parts = itertools.pairwise((0, *case.ends))
            alone = [
                saccade.dynamic_mask_attention(*(x[:, :, a:b] for x in leaves), keep=8, enable_gqa=True, backend="reference")
                for a, b in parts
            ]
            found = table._call(setting, case, leaves)()
            torch.testing.assert_close(found, torch.cat(alone, 2), atol=0.02, rtol=0.02, msg=str(case))

    def test_pairs_are_those_that_the_mask_keeps(self, table):
        setting = table.SETTING
        scores = torch.randn(1, setting.kv_heads, setting.length)
        for case in table.cases(setting):
            stop = saccade.expiry(scores, setting.keep, **case.arguments())
            kept = (stop - torch.arange(setting.length)).sum().item()
            assert case.pairs(setting) == kept * setting.heads // setting.kv_heads, str(case)

    def test_a_document_shorter_than_keep(self, table):
        assert table.kept_pairs(5, 8) == 1 + 2 + 3 + 4 + 5
        assert table.kept_pairs(10, 8) == 36 + 2 * 8

    def test_the_cuts_of_what_is_measured(self, load):
        table = load("tables.dynamic_mask_documents")
        setting, cases = table.SETTING, table.cases(table.SETTING)
        assert str(setting) == "B=1 H=8 Hkv=2 Tq=1000000 Tk=1000000 D=128 keep=1024 bf16"
        assert [(len(case.ends), case.given) for case in cases] == [
            (1, ""), (1, "document_ids"), (100, "document_ids"), (100, "cu_seqlens"), (100, "document_ids"), (100, "cu_seqlens"),
        ]  # fmt: skip
        equal, drawn = cases[3].ends, cases[5].ends
        assert {b - a for a, b in itertools.pairwise((0, *equal))} == {10_000}
        assert len(set(drawn)) == 100
        assert list(drawn) == sorted(drawn)
        assert {case.ends[-1] for case in cases} == {1_000_000}
        assert cases[0].pairs(setting) == 8 * (1_000_000 * 1024 - 1024 * 1023 // 2)

    def test_its_rows(self, table, load, tmp_path, capsys):
        rows = rows_of(table, load, tmp_path / "dynamic_mask_documents.csv")
        cases = table.cases(table.SETTING)
        assert len({(r["problem"], r["direction"]) for r in rows}) == len(rows) == 3 * len(cases)
        for row, case in zip(rows, [*cases, *cases, *cases], strict=True):
            assert row["problem"] == f"dynamic_mask({table.SETTING} {case})"
            assert row["note"].startswith(f"{case.pairs(table.SETTING)} pairs, ")
            assert re.search(r", (within|over) 1\.10$", row["note"])
            assert float(row["ms_p50"]) > 0
        assert rows[0]["note"].endswith("1.000 of one document of as many pairs, within 1.10")
        assert "6 equal documents, cu_seqlens" in capsys.readouterr().out
        assert load("plot").draw(tmp_path / "dynamic_mask_documents.csv") == []

    def test_times_are_compared_over_their_pairs(self, table):
        setting = table.SETTING
        before, _, several, *_ = table.cases(setting)
        share = several.pairs(setting) / before.pairs(setting)
        assert share < 0.95
        for factor, verdict in ((1.09, "within"), (1.11, "over")):
            times = {str(before): Timing(2.0, 1.0, 3.0), str(several): Timing(2.0 * share * factor, 1.0, 3.0)}
            assert table.over_one(setting, several, times) == pytest.approx(factor)
            assert table.note(setting, several, times).endswith(f"{factor:.3f} of one document of as many pairs, {verdict} 1.10")


class TestSampling:
    @pytest.fixture
    def table(self, load, monkeypatch):
        module = load("tables.dynamic_mask_sampling")
        ways = {"fused": saccade.dynamic_mask_scores, "torch": module.by_torch}
        given = {"DEVICE": "cpu", "SETTINGS": [module.Setting(48, 4, 2, 16, 8)], "in_turn": in_turn, "samplings": lambda: ways}
        for name, value in given.items():
            monkeypatch.setattr(module, name, value)
        return module

    def test_its_rows(self, table, load, tmp_path):
        rows = rows_of(table, load, tmp_path / "dynamic_mask_sampling.csv")
        attention = [("auto", "without sampling"), ("auto", "with sampling")]
        expected = [
            (*of, d)
            for part in (attention, [("fused", "sampling"), ("torch", "sampling")])
            for d in ("fwd", "fwd+bwd")
            for of in part
        ]
        assert [(r["backend"], r["note"], r["direction"]) for r in rows] == expected
        assert {r["problem"] for r in rows} == {"dynamic_mask(B=1 H=4 Hkv=2 Tq=48 Tk=48 D=16 keep=8 random bf16)"}
        assert all(float(r["ms_p50"]) > 0 for r in rows)
        assert all(float(r["roof_ms"]) > 0 for r in rows)

    def test_all_ways_compute_the_same(self, table):
        setting = table.SETTINGS[0]
        query, key, value, weight, A = table.made(setting)
        scores = saccade.dynamic_mask_scores(value, weight, A)
        torch.testing.assert_close(table.by_torch(value, weight, A), scores, rtol=0.02, atol=0.02)
        without, inside = (table.attention(setting, (query, key, value), *given)() for given in ((scores,), (weight, A)))
        assert torch.equal(without, inside)

    def test_the_fewest_bytes(self, load):
        """Values once forward; in backward once more, and their gradient."""
        table = load("tables.dynamic_mask_sampling")
        setting = table.Setting(1000, 8, 2, 64)
        assert table.sampling_bytes(setting, "fwd") == 1000 * (256 + 8)
        assert table.sampling_bytes(setting, "fwd+bwd") == 1000 * (3 * 256 + 6 * 8)
