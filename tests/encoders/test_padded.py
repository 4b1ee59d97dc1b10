"""Text models that cannot be packed: filled up to the next size they give what stock gives, and on a CPU they are stock."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers
from encoders_made import SIZES, made, padded
from graphs_made import install
from padded_made import PADDED, SEEING, made_padded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.encoders import padded as rooms
from saccade.encoders.capacity import columns_captured, rows_captured
from saccade.encoders.constants import Constants

LENGTHS = [(5, 9, 1, 7, 3), (3,), (17, 12)]


def served(model):
    return saccade.optimize(model).served[0]


def batch_of(model, lengths, **more):
    ids, mask = padded(lengths, model.config.pad_token_id or 0)
    return {"input_ids": ids, "attention_mask": mask, **more}


def filled_up(one, batch):
    """The outputs of a batch as a graph computes them, without the graph."""
    assert not one.unfit(batch)
    inputs = one.inputs((rows_captured(batch["input_ids"].shape[0]), one.form(batch)), torch.device("cpu"))
    inputs.load(batch)
    outputs = one.outputs(inputs)
    names = one._made[one._state][1]
    return dict(zip(names, one.cut(list(outputs), names, batch), strict=True)), inputs


def loss_of(outputs, mask):
    """The loss of every output at the real tokens."""
    return sum(
        (x[mask.bool()] if x.shape[:2] == mask.shape else x).sin().sum()
        for x in outputs.values()
        if x.is_floating_point() and x.dim() > 1
    )


def same_gradients(ours, theirs):
    for (where, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), where
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-9, msg=lambda text, where=where: f"{where}: {text}")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_a_batch_that_is_filled_up_gives_what_stock_gives(name, lengths):
    ours, theirs = made_padded(name)
    batch = batch_of(ours, lengths)
    got, inputs = filled_up(served(ours), batch)
    want = theirs(**batch)
    rows, columns = batch["input_ids"].shape
    assert inputs.tensors["input_ids"].shape == (rows_captured(rows), columns_captured(columns))
    assert list(got) == [key for key, x in want.items() if x is not None]
    real = batch["attention_mask"].bool()
    for key, x in got.items():
        assert x.shape == want[key].shape
        by_token = x.shape[:2] == real.shape
        torch.testing.assert_close(x[real] if by_token else x, want[key][real] if by_token else want[key], rtol=1e-9, atol=1e-9)
    loss_of(got, real).backward()
    loss_of({key: want[key] for key in got}, real).backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("name", PADDED)
def test_on_a_cpu_it_is_stock(name):
    ours, theirs = made_padded(name)
    with saccade.optimize(ours) as handle:
        for model in (ours, theirs):
            batch = batch_of(model, (5, 9, 1))
            loss_of(model(**batch), batch["attention_mask"]).backward()
        same_gradients(ours, theirs)
        assert handle.served[0].last == "stock: CUDA graphs need a GPU"
        assert "stock: CUDA graphs need a GPU; not packed: " in handle.explain()
        assert "is not known to mix tokens in its attention alone" in handle.explain()


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_what_is_added_is_found(name):
    one = served(made_padded(name)[0])
    assert one.unfit(batch_of(one.model, (5, 9, 1))) == "its last_hidden_state depends on padding of mask 0"
    one.model_device = lambda: torch.device("cuda")
    assert "stock: its last_hidden_state depends on padding" in one.describe()


class Toy(transformers.PreTrainedModel):
    """Embeddings, and what a test puts behind them."""

    config_class = transformers.BertConfig

    def __init__(self, config, behind=None):
        super().__init__(config)
        self.embed, self.behind = nn.Embedding(config.vocab_size, config.hidden_size), behind

    def forward(self, input_ids=None, attention_mask=None):
        hidden = self.embed(input_ids)
        return transformers.modeling_outputs.BaseModelOutput(self.behind(hidden, attention_mask))


def toy(behind):
    config = transformers.BertConfig(**SIZES)
    config.model_type = "toy"
    return Toy(config, behind).eval()


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        (lambda x, mask: x * mask[..., None], ""),
        (lambda x, mask: x + x.mean(1, keepdim=True), "depends on padding of mask 0"),
        (lambda x, mask: x * x.shape[1], "depends on the width of the batch"),
        (lambda x, mask: x + x.mean(0, keepdim=True), "depends on padding of mask 0"),
        (lambda x, mask: x * x.shape[0], "depends on the width of the batch"),
        (lambda x, mask: x[:, ::2], "does not follow the width"),
        (lambda x, mask: x.view(3, 9, 32), "a batch that is filled up fails"),
        (lambda x, mask: x.mean(1, keepdim=True) * float("nan"), "depends on padding of mask 0"),
    ],
    ids=["fits", "mean", "width", "rows mixed", "rows counted", "halved", "fails", "nan"],
)
def test_what_the_probe_finds(behind, reason):
    one = served(toy(behind))
    found = one.unfit(batch_of(one.model, (5, 9, 1)))
    assert reason in found
    assert bool(reason) == bool(found)


def test_an_output_as_wide_as_the_batch_by_chance_is_not_cut():
    ours, theirs = made_padded("mpnet")
    batch = batch_of(ours, (32, 9))  # the pooler gives 32 numbers
    got, _ = filled_up(served(ours), batch)
    torch.testing.assert_close(got["pooler_output"], theirs(**batch).pooler_output)


def test_the_probe_leaves_modes_and_random_numbers():
    ours, _ = made_padded("mpnet")
    ours.train()
    ours.encoder.layer[0].eval()
    one, batch = served(ours), batch_of(ours, (5, 9))
    modes, state = [m.training for m in ours.modules()], torch.get_rng_state()
    assert not one.unfit(batch)
    assert [m.training for m in ours.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_on_the_host_are_no_part_of_a_graph():
    one = served(toy(lambda x, mask: x + 0 * torch.rand([])))
    batch = batch_of(one.model, (5, 9))
    assert not one.unfit(batch)
    inputs, state = one.inputs((2, one.form(batch)), torch.device("cpu")), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="draws random numbers on the host"):
        one.outputs(inputs)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_added_holds_nothing_of_the_last_batch():
    ours, _ = made_padded("mpnet")
    one, batch = served(ours), batch_of(ours, (5, 9, 1))
    inputs = one.inputs((4, one.form(batch)), torch.device("cpu"))
    inputs.load({name: torch.full((4, 16), 7) for name in batch})
    inputs.load(batch)
    ids, mask = inputs.tensors["input_ids"], inputs.tensors["attention_mask"]
    assert torch.equal(ids[:3, :9], batch["input_ids"])
    assert (ids[:, 9:] == 1).all()
    assert (ids[3] == 1).all()
    assert (mask[:3, 9:] == 0).all()
    assert mask[3].tolist() == [1] + [0] * 15


def test_widths():
    found = sorted({columns_captured(columns) for columns in range(1, 513)})
    assert len(found) == 16
    assert found[:6] == [16, 32, 48, 64, 80, 96]
    assert all(columns_captured(columns) >= columns for columns in range(1, 3000))
    one = served(made_padded("mpnet")[0])  # 40 positions, of which the first real one is the third
    width = [one.form(batch_of(one.model, (columns,)))[0][1][0] for columns in (9, 33, 38, 39, 40)]
    assert width == [16, 38, 38, 39, 40]
    ids = torch.full((2, 9), 5)
    assert one.form({"input_ids": ids})[0][1] == (9,)  # without a mask nothing can be hidden


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"attention_mask": None}, ""),
        ({"return_dict": False, "output_attentions": False, "num_items_in_batch": torch.tensor(2)}, ""),
        ({"input_ids": None}, "it has no input_ids"),
        ({"output_hidden_states": True}, "output_hidden_states is asked for"),
        ({"inputs_embeds": torch.zeros(2, 6, 32)}, "inputs_embeds is given"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask is no `[B, T]`"),
        ({"input_ids": torch.ones(2, 41, dtype=torch.long), "attention_mask": None}, "the positions end at 40"),
        ({"input_ids": torch.ones(257, 2, dtype=torch.long), "attention_mask": None}, "graphs end at 256 rows"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_captured(arguments, reason):
    one = served(made_padded("mpnet")[0])
    found = one.refused_arguments({"input_ids": padded((6, 6), 1)[0], "attention_mask": torch.ones(2, 6)} | arguments)
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_large_batch_keeps_the_gpu_busy():
    one = served(made_padded("t5")[0])
    assert "graphs end at 32768 tokens" in one.refused_arguments({"input_ids": torch.ones(66, 512, dtype=torch.long)})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)),
            "gpt2 is not known",
        ),
        (
            lambda: transformers.BartModel(transformers.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1)),
            "bart is not known",
        ),
        (lambda: transformers.BertModel(transformers.BertConfig(**SIZES, is_decoder=True)), "configured as a decoder"),
    ],
    ids=["gpt2", "bart", "decoder"],
)
def test_decoders_are_refused(model, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.optimize(model())


def test_a_rotary_embedding_that_grows_is_left():
    model = made("bert")[0]
    model.config.rope_parameters = {"rope_type": "dynamic"}
    with pytest.raises(saccade.InvalidArgument, match="depends on the longest sequence"):
        saccade.optimize(model)


def test_relative_positions_of_a_packed_family():
    ours, theirs = made("bert")
    ours.config.position_embedding_type = "relative_key"
    handle = saccade.optimize(ours)
    assert isinstance(handle.served[0], rooms.Padded)
    assert "relative positions are those of the padded batch" in handle.explain()
    assert ours.config._attn_implementation == theirs.config._attn_implementation


@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering", "TokenClassification", "MaskedLM"])
def test_the_base_below_a_head_is_served(head):
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**PADDED["deberta-v2"][2])
    ours = getattr(transformers, f"DebertaV2For{head}")(config).eval()
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    assert [one.model for one in handle.served] == [ours.deberta]
    batch = batch_of(ours, (5, 9))
    for x, y in zip(ours(**batch).values(), theirs(**batch).values(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["mpnet", "t5"])
def test_a_copy_runs_its_own_weights(name, how):
    ours, _ = made_padded(name)
    saccade.optimize(ours)
    if how == "deepcopy":
        other = copy.deepcopy(ours)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    batch = batch_of(ours, (5, 9))
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.5)
        changed = other(**batch)[0]
        assert not torch.allclose(changed, ours(**batch)[0])
        for x in ours.parameters():
            x.mul_(1.5)
        torch.testing.assert_close(ours(**batch)[0], changed)


def test_restore_and_prepare():
    ours, _ = made_padded("t5")
    keys, implementation, signature = set(ours.__dict__), ours.config._attn_implementation, inspect.signature(ours.forward)
    with saccade.optimize(ours) as handle:
        assert inspect.signature(ours.forward) == signature
        assert ours.config._attn_implementation == implementation
        handle.prepare(tokens=64)
        with pytest.raises(saccade.InvalidArgument, match="T5EncoderModel is not packed"):
            handle.capture(lambda batch: ours(**batch)[0])
        with pytest.raises(saccade.InvalidArgument, match="optimised already"):
            saccade.optimize(ours)
    assert set(ours.__dict__) == keys


def test_numbers_of_the_host_are_made_on_the_device():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, there = [], torch.zeros(3, dtype=torch.int64, device="meta")
    with Seen(), Constants():
        found = torch.tensor(2.0).type_as(there)
    assert (found.device, found.dtype, found.shape) == (there.device, there.dtype, ())
    with Seen(), Constants():
        made = torch.tensor(0.5, device="meta", dtype=torch.float16)
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.float16, ())
    assert seen.count("aten.full.default") == 2
    assert "aten._to_copy.default" not in seen


def test_a_tensor_of_the_host_is_copied_once():
    """As MPNet makes its positions: the capture takes the copy of the run before it."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, constants = [], Constants()
    for number in range(2):
        with Seen(), constants:
            found = torch.arange(3).to("meta", torch.float32)
        assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float32, (3,))
        assert seen.count("aten._to_copy.default") == 1, number
    with Seen(), constants:
        torch.arange(1, 4).to("meta", torch.float32)
        torch.arange(3).to("meta", torch.float64)
    assert seen.count("aten._to_copy.default") == 3


def test_nothing_is_copied_between_host_and_device_while_a_model_is_captured():
    """DeBERTa-v2's buckets: without a device the meta device stands for one."""
    ours, _ = made_padded("deberta-v2", torch.float32)
    one, batch = served(ours), batch_of(ours, (5, 9))
    assert not one.unfit(batch)
    inputs = one.inputs((2, one.form(batch)), torch.device("meta"))
    ours.to("meta")

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if "_to_copy" in str(func) and args[0].device.type == "cpu":
                assert torch.device(kwargs.get("device") or "cpu").type == "cpu"
            return func(*args, **kwargs)

    with Copies():
        one.outputs(inputs)


def test_another_attention_is_noticed():
    one = served(made_padded("t5")[0])
    assert not one._refused_model()
    one.model.set_attn_implementation("eager")
    assert one._refused_model() == "its attention was 'sdpa' and is 'eager' now"


def test_an_output_that_comes_in_training_alone_is_not_captured():
    ours, _ = made_padded("mpnet")
    one, batch = served(ours), batch_of(ours, (5, 9))
    assert not one.unfit(batch)
    one.stock = lambda **given: {"last_hidden_state": torch.zeros(2), "loss": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="MPNetModel returns loss in training alone"):
        one.outputs(SimpleNamespace(tensors={}))


@pytest.fixture
def captures(monkeypatch):
    """Graphs on a CPU."""
    install(monkeypatch)


@pytest.mark.parametrize("name", PADDED)
def test_a_whole_call(name, captures):
    ours, theirs = made_padded(name)
    handle = saccade.optimize(ours)
    for lengths in [(5, 9, 1), (17,), (3, 4)]:  # the third reads what the first has left
        batch = batch_of(ours, lengths)
        real = batch["attention_mask"].bool()
        for model in (ours, theirs):
            model.zero_grad()
        got, want = ours(**batch), theirs(**batch)
        assert type(got) is type(want)
        torch.testing.assert_close(got[0][real], want[0][real], rtol=1e-9, atol=1e-9)
        loss_of(got, real).backward()
        loss_of(want, real).backward()
        same_gradients(ours, theirs)
    assert handle.served[0].last == "captured: 2 rows in a graph of 2"
    found = ours(**batch, return_dict=False)
    assert isinstance(found, tuple)
    assert len(handle.served[0].graphs) == 3


def test_a_config_whose_results_are_tuples(captures):
    """Graphs find outputs by their names, whatever the config says of results."""
    ours, theirs = made_padded("mpnet")
    for model in (ours, theirs):
        model.config.return_dict = False
    handle, batch = saccade.optimize(ours), batch_of(ours, (5, 9, 1))
    got, want = ours(**batch), theirs(**batch)
    assert handle.served[0].last == "captured: 3 rows in a graph of 4"
    assert [type(x) for x in (got, *got)] == [type(x) for x in (want, *want)]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[0][real], want[0][real], rtol=1e-9, atol=1e-9)
    for ours_x, theirs_x in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(ours_x, theirs_x, rtol=1e-9, atol=1e-9)


def test_calls_that_take_the_way_of_stock(captures, caplog):
    ours, theirs = made_padded("mpnet")
    handle = saccade.optimize(ours)
    left = batch_of(ours, (5, 9)) | dict(zip(("input_ids", "attention_mask"), padded((5, 9), 1, "left"), strict=True))
    exact = padded((5, 16), 1, "left")  # no column is added to a width of 16
    for batch, last in [(left, f"stock: {rooms._LEFT}"), ({"input_ids": exact[0], "attention_mask": exact[1]}, "captured")]:
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(ours(**batch)[0][real], theirs(**batch)[0][real], rtol=1e-9, atol=1e-9)
        assert handle.served[0].last.startswith(last)
    ids = left["input_ids"]
    torch.testing.assert_close(ours(ids)[0], theirs(ids)[0], rtol=1e-9, atol=1e-9)
    assert handle.served[0].last == "captured: 2 rows in a graph of 2"
    (name,) = SEEING
    ours, theirs = made_padded(name)
    saccade.optimize(ours)
    batch = batch_of(ours, (5, 9))
    for _ in range(2):
        torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
    assert caplog.text.count("ConvBertModel: its last_hidden_state depends on padding of mask 0; it runs as stock") == 1
