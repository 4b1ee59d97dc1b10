"""A captured function gives what the plain one gives. Without a GPU it runs uncaptured; what a capture finds inside is tried on the host."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from encoders_made import SIZES, made, padded

import saccade
from saccade.encoders.captured import Inside, _active, columns_of, widened
from saccade.encoders.packing import PLACES
from saccade.errors import InvalidArgument


def classifiers():
    torch.manual_seed(0)
    ours = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3)).double().eval()
    return ours, copy.deepcopy(ours)


def batch_of(lengths, seed=0, **more):
    ids, mask = padded(lengths, seed=seed)
    return {"input_ids": ids, "attention_mask": mask, **more}


def step_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        found = model(**batch)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": found.loss, "more": (found.logits, [None, 3])}

    return step


def test_without_a_gpu_a_step_is_the_plain_one():
    ours, theirs = classifiers()
    with saccade.optimize(ours) as handle:
        got_step, want_step = handle.capture(step_of(ours)), step_of(theirs)
        for i, lengths in enumerate([(5, 9, 2), (12, 3, 3), (5, 9, 2)]):
            batch = batch_of(lengths, i, labels=torch.tensor([0, 2, 1]))
            got, want = got_step(batch), want_step(batch)
            torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(got["more"][0], want["more"][0], rtol=1e-8, atol=1e-9)
            assert got["more"][1] == [None, 3]
            assert not got["loss"].requires_grad
        for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)
        assert "graphs need a GPU" in got_step.last
        assert "step: 0 graphs" in handle.explain()
        assert handle.served[0].last == "unpadded"


def test_after_restore_the_function_runs_on_the_stock_model():
    ours, theirs = classifiers()
    handle = saccade.optimize(ours)
    function = handle.capture(lambda batch: ours(**batch).logits)
    handle.restore()
    batch = batch_of((5, 9))
    assert torch.equal(function(batch), theirs(**batch).logits)
    assert "restored" in function.last
    with pytest.raises(InvalidArgument, match="serves 0 encoders"):
        handle.capture(print)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.ones(2, 3), "batch is a Tensor; it must be a dict"),
        ({"attention_mask": torch.ones(2, 3)}, "it must hold input_ids"),
        ({}, "batch holds nothing"),
        ({"input_ids": [[1, 2]]}, "'input_ids'.* is a list"),
    ],
    ids=str,
)
def test_a_bad_batch(batch, said):
    ours, _ = made("bert")
    function = saccade.optimize(ours).capture(lambda batch: batch)
    with pytest.raises(InvalidArgument, match=said):
        function(batch)


def test_what_cannot_be_captured_is_refused():
    ours, _ = made("bert")
    with pytest.raises(InvalidArgument, match="function is a int; it must be callable"):
        saccade.optimize(ours).capture(3)
    both = torch.nn.ModuleList([made("bert")[0], made("roberta")[0]])
    with pytest.raises(InvalidArgument, match="serves 2 encoders"):
        saccade.optimize(both).capture(print)


def test_columns_are_filled_up_to_a_multiple_of_16():
    labels = torch.ones(2, 18, dtype=torch.long)
    batch = batch_of((18, 7), token_type_ids=labels, position_ids=labels, labels=labels, weight=torch.ones(2))
    assert columns_of(batch, 40) == 32
    wide = widened(batch, 32, padding=5)
    for name, fill in (("input_ids", 5), ("attention_mask", 0), ("token_type_ids", 0), ("position_ids", 0), ("labels", -100)):
        assert wide[name].dtype == batch[name].dtype
        assert torch.equal(wide[name][:, :18], batch[name])
        assert (wide[name][:, 18:] == fill).all()
    assert wide["weight"] is batch["weight"]
    assert columns_of(batch_of((16, 7)), None) == 16
    assert columns_of(batch_of((18, 7), labels=torch.ones(2, dtype=torch.long)), None) == 32


@pytest.mark.parametrize(
    "more",
    [
        {"scores": torch.ones(2, 18)},
        {"labels": torch.ones(2, 18)},  # of classes, of which there are as many as columns
        {"labels": torch.ones(2, 18, 3, dtype=torch.long)},
        {"position_ids": torch.ones(1, 18, dtype=torch.long)},
        {"attention_mask": None},
    ],
    ids=str,
)
def test_columns_stay_where_a_tensor_cannot_be_filled_up(more):
    batch = {name: x for name, x in batch_of((18, 7), **more).items() if x is not None}
    assert columns_of(batch, None) == 18


def test_columns_end_with_the_positions_of_the_model():
    assert columns_of(batch_of((36, 7)), 40) == 40
    assert columns_of(batch_of((36, 7)), 36) == 36


class OnTheHost:
    """`graphs.Inputs` in the memory of the host."""

    def __init__(self, packed, capacity):
        self.capacity, self.longest = capacity, 64
        self.numbers = torch.zeros(4, capacity, dtype=torch.int64)
        self.numbers[:, : packed.tokens] = torch.as_tensor(packed.numbers)
        self.ends = torch.full((capacity + 1,), packed.tokens, dtype=torch.int32)
        self.ends[: len(packed.ends)] = torch.as_tensor(packed.ends)

    def arguments(self, types):
        found = {"input_ids": self.numbers[0][None], "position_ids": self.numbers[1][None]}
        return found | ({"token_type_ids": self.numbers[2][None]} if types else {})


def inside_of(served, batch):
    served.state.read()
    return Inside(served, batch, OnTheHost(served._pack(batch)[0], 64))


@pytest.mark.parametrize("types", [False, True])
def test_a_call_inside_reads_packed_tokens_of_a_capacity(types):
    ours, theirs = (x.eval() for x in made("bert"))
    served = saccade.optimize(ours).served[0]
    batch = batch_of((5, 9, 12))
    batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape)
    inside = inside_of(served, batch)
    assert (inside.inputs.numbers[PLACES, 26:] == 0).all()  # the tail's places are those of the first token
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")[: 2 + types]}
    real, grads = batch["attention_mask"].bool(), []
    for model in (ours, theirs):
        with _active(inside):
            found = model(**given)
        (found.last_hidden_state[real].square().sum() + found.pooler_output.sum()).backward()
        grads.append((found, [x.grad for x in model.parameters()]))
    (got, got_grads), (want, want_grads) = grads
    assert "in a captured function" in served.last
    torch.testing.assert_close(got.last_hidden_state[real], want.last_hidden_state[real], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.pooler_output, want.pooler_output, rtol=1e-9, atol=1e-9)
    assert (got.last_hidden_state[~real] == 0).all()
    for x, y in zip(got_grads, want_grads, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def test_another_call_inside_runs_as_stock():
    ours, theirs = (x.eval() for x in made("bert"))
    handle = saccade.optimize(ours)
    served, batch = handle.served[0], batch_of((5, 9, 12))
    inside = inside_of(served, batch)
    with _active(inside), torch.no_grad():
        got = ours(batch["input_ids"].clone(), batch["attention_mask"])[0]
    assert served.last == "stock: its input_ids are not those of the captured function's batch"
    with torch.no_grad():
        torch.testing.assert_close(got, theirs(**batch)[0], rtol=1e-9, atol=1e-9)
        ours(**batch)
    assert served.last == "unpadded"


class Recorded:
    """A `_Step` on the host: it tells what is asked of it, and computes the step whenever a GPU would."""

    told: list[str] = []  # noqa: RUF012
    fails: BaseException | None = None
    bytes, last = 0, "inside"

    def __init__(self, served, batch, size, device):
        self.size = size

    def load(self, batch, packed):
        self.batch = batch
        self.told.append(f"load {packed.tokens}")

    def warm(self, function, stream):
        self.told.append(f"warm {self.size}")
        return function(self.batch)

    def capture(self, function, stream, pool):
        self.told.append(f"capture {self.size}")
        if self.fails is not None:
            raise self.fails
        self.function = function

    def replay(self):
        self.told.append("replay")
        return self.function(self.batch)


@pytest.fixture
def recorded(monkeypatch):
    from unittest.mock import MagicMock

    from saccade.encoders import captured, served

    monkeypatch.setattr(captured, "_Step", Recorded)
    monkeypatch.setattr(captured.CapturedFunction, "_refused", lambda self, *given: self.failed)
    monkeypatch.setattr(served.Served, "_graphs_on", lambda self, device: MagicMock())
    monkeypatch.setattr(Recorded, "told", [])
    return Recorded


def test_a_size_warms_up_then_is_captured_then_replayed(recorded):
    ours, _ = made("bert")
    handle = saccade.optimize(ours.eval())
    calls = []
    function = handle.capture(lambda batch: calls.append(batch["input_ids"].shape[1]))
    function(batch_of((5, 9)))
    function(batch_of((5, 9, 1)))  # another number of rows
    function(batch_of((13, 2)))  # of the columns and the capacity of the first
    function(batch_of((4, 6)))
    ours.train()
    function(batch_of((5, 9)))
    with torch.no_grad():
        function(batch_of((5, 9)))
    assert recorded.told == [
        "load 14", "warm 64", "load 15", "warm 64", "load 15", "capture 64", "replay", "load 10", "replay", "load 14", "warm 64", "load 14",
        "warm 64",
    ]  # fmt: skip
    assert calls == [16] * 6
    assert "1 graphs" in handle.explain()
    assert "warms up" in function.last


def test_batches_that_stock_has_to_see_run_uncaptured(recorded):
    ours, _ = made("bert")
    function = saccade.optimize(ours.eval()).capture(lambda batch: batch["input_ids"].shape[1])
    assert function(batch_of((0, 0), 2)) == 1
    assert "no real token" in function.last
    ids, mask = padded((5, 9), side="left")
    assert function({"input_ids": ids, "attention_mask": mask}) == 9
    assert "a padded position is used" in function.last
    assert recorded.told == []


def test_a_capture_that_fails_computes_the_step_once_and_says_so(recorded, caplog, monkeypatch):
    ours, _ = made("bert")
    handle = saccade.optimize(ours.eval())
    widths = []
    function = handle.capture(lambda batch: widths.append(batch["input_ids"].shape[1]))
    monkeypatch.setattr(recorded, "fails", RuntimeError("no capture today"))
    for _ in range(4):
        function(batch_of((5, 9)))
    assert widths == [16, 9, 9, 9]
    assert caplog.text.count("no capture today") == 1
    assert "no capture today" in handle.explain()
    assert not handle.served[0].graphs


def test_an_error_of_the_function_while_it_is_captured_is_the_callers(recorded, monkeypatch):
    ours, _ = made("bert")
    function = saccade.optimize(ours.eval()).capture(lambda batch: None)
    function(batch_of((5, 9)))
    monkeypatch.setattr(recorded, "fails", KeyError("labels"))
    with pytest.raises(KeyError):
        function(batch_of((5, 9)))
    monkeypatch.setattr(recorded, "fails", None)
    function(batch_of((5, 9)))
    assert recorded.told[-1] == "replay"
