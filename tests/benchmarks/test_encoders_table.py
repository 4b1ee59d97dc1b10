"""The table of whole encoders runs with tiny models on a CPU, without graphs."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sentence_transformers")
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def _tiny(architecture):
    return replace(architecture, sizes={**architecture.sizes, **TINY})


def _small(case):
    peers = tuple(peer for peer in case.peers if peer == "varlen_unpadded")  # a CPU has no graphs, and may have no compiler
    return replace(case, architecture=_tiny(case.architecture), batch=4, dtype="float32", peers=peers)


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
    strings = load("encoder_strings")
    for name, value in {"ROUNDS": 1, "WINDOW": 0, "COMPARED": 12}.items():
        monkeypatch.setattr(strings, name, value)
    few = {(case.pairs, case.dtype): replace(case, count=24, architecture=_tiny(case.architecture)) for case in strings.STRINGS}
    monkeypatch.setattr(module, "STRINGS", list(few.values()))
    images = load("encoder_images")
    monkeypatch.setattr(images, "ROUNDS", 1)
    small = {**_tiny(images.VIT).sizes, "image_size": 16, "patch_size": 8}
    monkeypatch.setattr(
        module, "IMAGES", [replace(case, architecture=replace(images.VIT, sizes=small), batch=3) for case in images.IMAGES[:1]]
    )
    return module


def _writer(folder, *words):
    """For a part of the table."""
    from parts import Part
    from rows import Writer

    return Writer(folder / "encoders.csv", dict.fromkeys(("gpu", "torch", "date"), "x"), Part(words))


def _rows(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_every_kind_of_row(table, tmp_path):
    table.run(_writer(tmp_path, "sentences", "passages"), 1)
    rows = _rows(tmp_path / "encoders.csv")
    assert {r["backend"] for r in rows if r["direction"] == "fwd"} == {"stock", "saccade", "saccade_plain", "varlen_unpadded"}
    steps = {"stock", "saccade", "saccade_captured", "saccade_plain_captured"}
    assert {r["backend"] for r in rows if r["direction"] == "fwd+bwd"} == steps
    assert len({(r["problem"], r["direction"]) for r in rows}) == len(table.CASES)
    assert all("texts/s" in r["note"] for r in rows)
    parts = ("zero_grad", "forward", "backward and AccumulateGrad", "clip", "AdamW")
    for row in rows:
        in_a_loop = row["direction"] == "fwd+bwd" and "captured" not in row["backend"]
        assert all((part in row["note"]) == in_a_loop for part in parts)
        assert ("packing" in row["note"]) == (in_a_loop and row["backend"] == "saccade")


def test_rows_from_strings(table, tmp_path):
    table.run(_writer(tmp_path, "strings"), 1)
    rows = _rows(tmp_path / "encoders.csv")
    problems = {r["problem"] for r in rows}
    assert len(problems) == 4  # of both dtypes
    assert all("from strings texts=24 mean=" in problem for problem in problems)
    for problem in problems:
        assert [r["backend"] for r in rows if r["problem"] == problem] == ["stock", "stock_best", "saccade"]
    words = ("texts/s", "Rust alone", "device alone", "of the larger", "waits for tokens", "waits for results")
    assert all(word in r["note"] for r in rows if r["backend"] == "saccade" for word in words)


def test_rows_of_images(table, tmp_path):
    table.run(_writer(tmp_path, "images"), 1)
    rows = _rows(tmp_path / "encoders.csv")
    names = ("stock", "saccade", "saccade_plain")
    assert [(r["problem"], r["backend"]) for r in rows] == [("ViT-B/16 B=3 images tokens=5", x) for x in names]
    assert all("images/s" in r["note"] for r in rows)


def test_other_vectors_of_images_end_the_table(table, tmp_path, monkeypatch):
    import saccade

    optimize = saccade.optimize

    def reads_other_pixels(model, **options):
        next(x for name, x in model.named_parameters() if "position_embeddings" in name).data.normal_(std=9)
        return optimize(model, **options)

    monkeypatch.setattr(saccade, "optimize", reads_other_pixels)
    with pytest.raises(SystemExit, match=r"saccade of ViT-B/16 .*: a vector has a cosine"):
        table.run(_writer(tmp_path, "images"), 1)


@pytest.mark.parametrize(("pairs", "said"), [(False, "an embedding has a cosine"), (True, "scores differ")])
def test_other_results_from_strings_end_the_table(table, tmp_path, monkeypatch, pairs, said):
    import saccade

    optimize = saccade.optimize

    def forgets_the_places(model):
        next(x for name, x in model.named_parameters() if "position_embeddings" in name).data.zero_()
        next(x for name, x in model.named_parameters() if "word_embeddings" in name).data.neg_()
        return optimize(model)

    monkeypatch.setattr(saccade, "optimize", forgets_the_places)
    monkeypatch.setattr(table, "STRINGS", [case for case in table.STRINGS if case.pairs == pairs][:1])
    with pytest.raises(SystemExit, match=rf"saccade of MiniLM .*: {said}"):
        table.run(_writer(tmp_path, "strings"), 1)


def test_another_embedding_ends_the_table(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_embedded", lambda case, model, packed, width: torch.randn(len(packed["ends"]) - 1, 32))
    monkeypatch.setattr(table, "CASES", [case for case in table.CASES if "varlen_unpadded" in case.peers][:1])
    with pytest.raises(SystemExit, match=r"varlen_unpadded of .* a cosine of"):
        table.run(_writer(tmp_path), 1)


def _embed_in(seconds, compiles=True):
    import time

    import torch._dynamo.utils as dynamo

    def embed(batch):
        time.sleep(seconds)
        dynamo.counters["frames"]["ok"] += compiles
        return batch["input_ids"]

    return embed


def test_the_fastest_way_of_compiling_is_taken(load):
    module, batches = load("encoder_compiled"), [{"input_ids": torch.arange(3)}] * 2

    def make(options):
        if options == {"dynamic": True}:
            raise RuntimeError("no compiler\nin two lines")
        return _embed_in({"{}": 0.02, "{'mode': 'reduce-overhead'}": 0.002}.get(str(options), 0.3))

    found = module.fastest(make, batches, lambda: None, limit=0.25)
    assert found.note.startswith("reduce-overhead of: default compiled in 0 s, 4")
    assert "dynamic does not run (no compiler);" in found.note
    assert found.note.endswith("reduce-overhead, dynamic compiles for more than 0 s")
    assert torch.equal(found.embed(batches[0]), torch.arange(3))


def test_a_way_that_compiles_nothing_is_no_way(load):
    module, batches = load("encoder_compiled"), [{"input_ids": torch.arange(3)}]
    found = module.fastest(lambda options: _embed_in(0, compiles=False), batches, lambda: None)
    assert found.embed is None
    assert found.note.count("found nothing to compile") == len(module.WAYS)


def test_without_a_compiler_there_is_no_row(load):
    module = load("encoder_compiled")

    def make(options):
        raise RuntimeError("no compiler")

    found = module.fastest(make, [], lambda: None)
    assert found.embed is None
    assert found.note.count("does not run") == len(module.WAYS)


def test_the_compiler_gets_the_encoder(table, monkeypatch):
    """sentence-transformers calls the encoder's forward by its name, where `nn.Module.compile` is not asked."""
    case = next(case for case in table.CASES if case.direction == "fwd" and not case.passages)
    embed = table._compiled(case, {"backend": "eager", "dynamic": True})
    assert table.fastest(lambda options: embed, case.batches(), lambda: None, ["dynamic"]).note.startswith(
        "dynamic of: dynamic compiled"
    )
