"""Optimised encoders give what stock gives, at every real token, forward and gradients; restored, nothing is left."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from encoders_made import MODELS, SIZES, made, padded
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.encoders import families

LENGTHS = [(5, 9, 1, 7), (3,), (12, 12), (1, 1, 1)]


def padding_of(model):
    return model.config.pad_token_id


def compare(ours, theirs, ids, mask, **more):
    """Outputs at real tokens and gradients of every parameter; padded positions are 0."""
    real, results = mask.bool(), []
    for model in (ours, theirs):
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, **more)
        weights = torch.linspace(-1, 1, out.last_hidden_state[real].numel(), dtype=torch.float64)
        loss = (out.last_hidden_state[real].flatten() * weights).sum()
        pooled = getattr(out, "pooler_output", None)
        if pooled is not None:
            loss = loss + pooled.square().sum()
        loss.backward()
        results.append((out, [x.grad for x in model.parameters()]))
    (got, got_grads), (want, want_grads) = results
    assert type(got) is type(want)
    torch.testing.assert_close(got.last_hidden_state[real], want.last_hidden_state[real], rtol=1e-9, atol=1e-9)
    if getattr(want, "pooler_output", None) is not None:
        torch.testing.assert_close(got.pooler_output, want.pooler_output, rtol=1e-9, atol=1e-9)
    assert (got.last_hidden_state[~real] == 0).all()
    for x, y in zip(got_grads, want_grads, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_as_stock(name, side, lengths):
    ours, theirs = made(name)
    with saccade.optimize(ours.eval()) as handle:
        batch = padded(lengths, padding_of(ours), side, width=max(lengths) + 2)
        if side == "left" and getattr(ours, "pooler", None) is not None:  # it reads a padded position, so the batch is not packed
            torch.testing.assert_close(ours(*batch)[1], theirs.eval()(*batch)[1])
            assert "padding lies on the left" in handle.served[0].last
            ours.pooler = theirs.pooler = None
        compare(ours, theirs.eval(), *batch)
        assert handle.served[0].last == "unpadded"


def test_without_a_mask_and_with_types_and_positions():
    ours, theirs = made("bert")
    ids, mask = padded((7, 7, 7))
    saccade.optimize(ours.eval())
    types = torch.randint(0, 2, ids.shape)
    positions = torch.arange(30, 37).expand(3, 7)
    compare(ours, theirs.eval(), ids, mask, token_type_ids=types, position_ids=positions)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids)[0])


def test_a_row_without_a_token_and_a_batch_without_one():
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    ids, mask = padded((5, 0, 3))
    with torch.no_grad():
        found = ours(ids, mask)[0]
        torch.testing.assert_close(found[mask.bool()], theirs.eval()(ids, mask)[0][mask.bool()])
        ids, mask = padded((0, 0), width=4)
        torch.testing.assert_close(ours(ids, mask)[0], theirs(ids, mask)[0])
    assert handle.served[0].last == "stock: there is no real token"


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "MaskedLM"])
def test_heads_see_the_padded_output(head):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"BertFor{head}")
    ours = model_class(transformers.BertConfig(**SIZES)).double().eval()
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    ids, mask = padded((5, 9, 2))
    got, want = (m(input_ids=ids, attention_mask=mask).logits for m in (ours, theirs))
    real = mask.bool() if got.dim() == 3 else slice(None)
    torch.testing.assert_close(got[real], want[real], rtol=1e-9, atol=1e-9)
    assert handle.served[0].last == "unpadded"


def test_a_head_that_compares_padded_columns_is_not_packed():
    torch.manual_seed(0)
    ours = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES)).double().eval()
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    ids, mask = padded((5, 9, 2))
    asked = {"start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 8, 1])}
    torch.testing.assert_close(*(m(input_ids=ids, attention_mask=mask, **asked).loss for m in (ours, theirs)))
    assert "BertForQuestionAnswering compares all columns of a row" in handle.explain()


def test_dropout_differs_at_each_step_and_follows_the_seed():
    ours, _ = made("bert")
    saccade.optimize(ours.train())
    batch = padded((5, 9, 2))
    torch.manual_seed(1)
    first, second = ours(*batch)[0], ours(*batch)[0]
    torch.manual_seed(1)
    again = ours(*batch)[0]
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"output_hidden_states": True}, "output_hidden_states is asked for"),
        ({"output_attentions": True}, "output_attentions is asked for"),
        ({"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}, "is no key padding"),
        ({"inputs_embeds": torch.zeros(2, 6, 32, dtype=torch.float64), "input_ids": None}, "has no input_ids"),
        ({"encoder_hidden_states": torch.zeros(2, 3, 32, dtype=torch.float64)}, "encoder_hidden_states is given"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)}, "a token that is no padding has mask 0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_packed_runs_as_stock(arguments, reason):
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    call = {"input_ids": padded((6, 6))[0]} | arguments
    with torch.no_grad():
        got, want = ours(**call), theirs.eval()(**call)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    assert reason in handle.served[0].last
    assert reason in handle.explain()


def test_a_model_of_eager_attention_gives_its_weights():
    ours, theirs = made("bert")
    for x in (ours.eval(), theirs.eval()):
        x.set_attn_implementation("eager")
    with saccade.optimize(ours) as handle:
        ids, mask = padded((6, 4))
        weights, want = (x(ids, mask, output_attentions=True).attentions for x in (ours, theirs))
        assert len(want) == 2
        torch.testing.assert_close(weights, want)
        compare(ours, theirs, ids, mask)
        assert handle.served[0].last == "unpadded"
    assert ours.config._attn_implementation == "eager"


def test_calls_of_other_threads_wait_while_a_model_has_eager_attention():
    ours, theirs = made("bert")
    for x in (ours.eval(), theirs.eval()):
        x.set_attn_implementation("eager")
    ids, mask = padded((6, 4))
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait(*given):
        if threading.current_thread() is first:
            inside.set()
            assert go_on.wait(60)

    def call(name):
        with torch.no_grad():
            found.append((name, ours(ids, mask, **{name: True})))

    with saccade.optimize(ours):
        ours.encoder.layer[0].register_forward_hook(wait)
        first, second = (threading.Thread(target=call, args=[x]) for x in ("output_attentions", "output_hidden_states"))
        first.start()
        assert inside.wait(60)
        second.start()
        second.join(0.2)
        assert second.is_alive()  # else it would read a config that changes under it
        go_on.set()
        first.join(60)
        second.join(60)
    for name, got in found:
        with torch.no_grad():
            want = theirs(ids, mask, **{name: True})
        torch.testing.assert_close(got.last_hidden_state[mask.bool()], want.last_hidden_state[mask.bool()])
    assert [name for name, _ in found] == ["output_attentions", "output_hidden_states"]


def test_padding_between_tokens_is_counted_by_a_sliding_window(by):
    ours, theirs = made("modernbert")
    handle = saccade.optimize(ours.eval())
    for side in ("right", "left"):
        ids, mask = padded((20, 20, 7), side=side)
        compare(ours, theirs.eval(), ids, mask)
        assert handle.served[0].last == "unpadded"
    ids[1, 4:9] = mask[1, 4:9] = 0
    torch.testing.assert_close(ours(ids, mask)[0], theirs(ids, mask)[0])
    assert "a sliding window counts it" in handle.served[0].last


def test_a_model_on_the_meta_device_is_stock():
    model = made("bert")[0].to("meta")
    handle = saccade.optimize(model)
    ids = padded((5, 3))[0].to("meta")
    assert model(ids)[0].shape == (2, 5, 32)
    assert "meta device" in handle.served[0].last


def test_what_trainer_gives_to_a_loss_does_not_matter():
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    compare(ours, theirs.eval(), *padded((5, 9)), num_items_in_batch=torch.tensor(2))
    assert handle.served[0].last == "unpadded"


def test_return_dict_and_signature():
    ours, theirs = made("bert")
    before = inspect.signature(ours.forward)
    saccade.optimize(ours.eval())
    assert inspect.signature(ours.forward) == before
    batch = padded((5, 9))
    found, expected = (m(*batch, return_dict=False) for m in (ours, theirs.eval()))
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[1], expected[1])


def test_restore_leaves_nothing_behind():
    ours, _ = made("bert")
    keys, implementation = set(ours.__dict__), ours.config._attn_implementation
    with saccade.optimize(ours) as handle:
        assert handle.active
        with pytest.raises(saccade.InvalidArgument, match="optimised already"):
            saccade.optimize(ours)
    assert not handle.active
    assert set(ours.__dict__) == keys
    assert ours.config._attn_implementation == implementation
    handle.restore()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_runs_its_own_weights(how):
    ours, _ = made("bert")
    saccade.optimize(ours.eval())
    batch = padded((5, 9))
    if how == "deepcopy":
        other = copy.deepcopy(ours)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.5)
        real = batch[1].bool()
        changed, kept = other(*batch)[0][real], ours(*batch)[0][real]
        assert not torch.allclose(changed, kept)
        for x in ours.parameters():
            x.mul_(1.5)
        torch.testing.assert_close(ours(*batch)[0][real], changed)


def test_a_pickle_runs_in_a_process_that_has_optimised_nothing(tmp_path):
    ours, _ = made("bert")
    saccade.optimize(ours.eval())
    ids, mask = padded((5, 9))
    with torch.no_grad():
        torch.save((ours, ids, mask, ours(ids, mask)[0][mask.bool()]), tmp_path / "model.pt")
    load = f"m, ids, mask, found = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    run = f"import torch\n{load}\ntorch.testing.assert_close(m(ids, mask)[0][mask.bool()], found)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_state_dict_and_save_pretrained_are_stocks(tmp_path):
    ours, theirs = made("bert")
    saccade.optimize(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert again.config.architectures == ["BertModel"]


def test_hooks_inside_of_the_encoder_see_the_padded_batch():
    ours, theirs = made("bert")
    seen = []
    saccade.optimize(ours.eval())
    batch = padded((5, 9))
    with torch.no_grad():
        ours(*batch)
        for model in (ours, theirs.eval()):
            model.encoder.layer[0].register_forward_hook(lambda module, given, found: seen.append(found))
            model(*batch)
    torch.testing.assert_close(*seen)


class _Mixed(transformers.BertModel):
    """An encoder whose own forward mixes the tokens of a row."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.last_hidden_state = found.last_hidden_state.cumsum(1)
        return found

    forward.__signature__ = inspect.signature(transformers.BertModel.forward)


class _MixedLayer(type(made("bert")[0].encoder.layer[0])):
    """A layer that does so."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs).cumsum(1)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_class_with_a_forward_of_its_own_is_not_packed(part):
    config = transformers.BertConfig(**SIZES)
    ours = (_Mixed if part == "model" else transformers.BertModel)(config).eval()
    if part == "layer":
        ours.encoder.layer[1] = _MixedLayer(config).eval()
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    ids, mask = padded((5, 9))
    torch.testing.assert_close(ours(ids, attention_mask=mask)[0][mask.bool()], theirs(ids, attention_mask=mask)[0][mask.bool()])
    assert f"not packed: {'_Mixed' if part == 'model' else '_MixedLayer'} has a forward of its own" in handle.explain()


class _Asks(torch.nn.Module):
    """A linear layer that calls another encoder."""

    def __init__(self, linear, other, batch):
        super().__init__()
        self.linear, self.call = linear, functools.partial(other, *batch, output_hidden_states=True)
        self.found = None

    def forward(self, x):
        self.found = self.call()[0]
        return self.linear(x)


def test_a_part_of_one_encoder_calls_another():
    (ours, _), (other, theirs) = made("bert"), made("bert", num_hidden_layers=1)
    ids, mask = padded((12,), width=14)
    saccade.optimize(other.eval())
    asks = ours.encoder.layer[0].output.dense = _Asks(ours.encoder.layer[0].output.dense, other, (ids, mask))
    handle = saccade.optimize(ours.eval())
    with torch.no_grad():
        ours(*padded((5, 9)))
        torch.testing.assert_close(asks.found, theirs.eval()(ids, mask)[0])
    assert handle.served[0].last == "unpadded"


def test_a_second_implementation_that_the_user_chooses_is_respected():
    ours, _ = made("bert")
    handle = saccade.optimize(ours.eval())
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        ours(*padded((5, 9)))
    assert handle.served[0].last == "stock: its attention is 'eager' now"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (None, "model is a NoneType"),
        (torch.nn.Linear(2, 2), "Linear holds no model of transformers"),
    ],
)
def test_what_cannot_be_optimised(model, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.optimize(model)


def test_models_that_are_not_known_say_so():
    model = transformers.FNetModel(transformers.FNetConfig(**SIZES))
    with pytest.raises(saccade.InvalidArgument, match="fnet is not known to mix tokens in its attention alone"):
        saccade.optimize(model)
    causal = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    with pytest.raises(saccade.InvalidArgument, match="may generate"):
        saccade.optimize(causal)


@pytest.mark.parametrize("memory", [0, 1.5, "much", True])
def test_memory_is_a_share(memory):
    with pytest.raises(saccade.InvalidArgument, match="memory is"):
        saccade.optimize(made("bert")[0], memory=memory)


@pytest.mark.parametrize("tokens", [0, -1, "x", [5, 0], True, 1.5])
def test_prepare_takes_positive_numbers(tokens):
    handle = saccade.optimize(made("bert")[0])
    with pytest.raises(saccade.InvalidArgument, match="tokens is"):
        handle.prepare(tokens)


def test_too_many_tokens_for_the_positions():
    ours, _ = made("bert")
    saccade.optimize(ours)
    with pytest.raises(saccade.InvalidArgument, match="input_ids have 41 tokens a row; the positions of BertModel end at 40"):
        ours(torch.ones(1, 41, dtype=torch.long))


def test_ids_and_mask_lie_together():
    ours, _ = made("bert")
    saccade.optimize(ours)
    with pytest.raises(saccade.InvalidArgument, match="attention_mask lies on meta and input_ids on cpu; they must lie together"):
        ours(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long, device="meta"))


def test_ids_that_are_no_integers_get_stocks_error():
    ours, theirs = made("bert")
    saccade.optimize(ours)
    errors = []
    for model in (ours, theirs):
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(1, 4))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_too_many_tokens_for_counted_positions():
    ours, _ = made("roberta")
    saccade.optimize(ours)
    with pytest.raises(saccade.InvalidArgument, match="a sequence has 39 tokens; the positions of RobertaModel end at 38"):
        ours(torch.full((1, 39), 5))


def test_a_model_that_does_not_run_as_its_family_says_is_stock(monkeypatch, caplog):
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    monkeypatch.setattr(families, "layers_of", lambda config: 3)
    batch = padded((5, 9))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(*batch)[0], theirs.eval()(*batch)[0])
    assert "called its attention 2 times for 3 layers" in handle.explain()
    assert caplog.text.count("it runs as stock") == 1


def test_restore_keeps_what_others_chose():
    ours, _ = made("bert")
    forward = ours.forward
    ours.forward = forward  # as accelerate puts one there
    handle = saccade.optimize(ours)
    ours.set_attn_implementation("eager")
    handle.restore()
    assert ours.__dict__["forward"] is forward
    assert ours.config._attn_implementation == "eager"


@pytest.mark.parametrize("bad", [{"sequences": 0}, {"sequences": "x"}, {"train": "yes"}], ids=str)
def test_prepare_checks_its_options(bad):
    handle = saccade.optimize(made("bert")[0])
    with pytest.raises(saccade.InvalidArgument, match=f"{next(iter(bad))} is"):
        handle.prepare(100, **bad)


def test_every_family_has_a_tiny_model_here():
    kinds = {getattr(transformers, config)().model_type for _, config, _ in MODELS.values()}
    assert kinds <= set(families.FAMILIES)


def test_an_exception_inside_leaves_the_model_whole():
    ours, theirs = made("bert")
    saccade.optimize(ours.eval())
    pooler, batch = ours.pooler, padded((5, 9))
    with pytest.raises(IndexError):
        ours(torch.full((1, 3), 10**6))
    assert ours.pooler is pooler
    with torch.no_grad():
        torch.testing.assert_close(ours(*batch)[1], theirs.eval()(*batch)[1])


def test_a_thread_sees_a_whole_model_while_another_runs_it():
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    ids, mask = padded((5, 9))
    found = []

    class Looks(torch.nn.Module):
        def forward(self, x):
            found.append((ours.pooler is pooler, any(name.startswith("pooler.") for name in ours.state_dict())))
            return x

    pooler = ours.pooler
    ours.encoder.layer[1].output.add_module("dropout", Looks())
    with torch.no_grad():
        outputs = ours(ids, mask)
        assert handle.served[0].last == "unpadded"
        torch.testing.assert_close(outputs.pooler_output, theirs.eval()(ids, mask).pooler_output)
    assert found == [(True, True)]


def test_a_forward_of_others_runs_without_its_pooler():
    ours, theirs = made("bert")
    stock, pooler = ours.eval().forward, ours.pooler
    ours.forward = functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))
    handle = saccade.optimize(ours)
    ids, mask = padded((5, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, mask).pooler_output, theirs.eval()(ids, mask).pooler_output)
    assert handle.served[0].last == "unpadded"
    assert ours.pooler is pooler


@pytest.mark.parametrize("number", [0, 5, None])
def test_positions_are_counted_as_the_embeddings_count_them(number):
    ours, theirs = made("roberta")
    for model in (ours, theirs):
        model.eval().config.pad_token_id = number  # the embeddings keep 1
    saccade.optimize(ours)
    ids, mask = padded((5, 9), padding=number or 0)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, mask)[0][mask.bool()], theirs(ids, mask)[0][mask.bool()])


def _wrapped(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, layer in enumerate(model.encoder.layer):
        model.encoder.layer[i] = checkpoint_wrapper(layer)


@pytest.mark.parametrize(
    "enable",
    [
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda model: (model.enable_input_require_grads(), model.gradient_checkpointing_enable({"use_reentrant": True})),
        _wrapped,
    ],
    ids=["kept", "reentrant", "wrapper"],
)
def test_layers_that_are_computed_again_in_backward(enable):
    pairs = made("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    handle = saccade.optimize(pairs[0])
    ids, mask = padded((5, 9))
    for model in pairs:
        model.train()
        model(ids, mask)  # before it is asked for
        enable(model)
        model(ids, mask)[0][mask.bool()].square().sum().backward()
    reason = "gradient checkpointing computes layers again in backward, where no sequence has its borders"
    assert handle.served[0].last == f"stock: {reason}"
    for x, y in zip(*(model.parameters() for model in pairs), strict=True):
        assert (x.grad is None) == (y.grad is None)
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-9)


def test_two_models_in_two_threads():
    pairs = [made(name) for name in ("bert", "distilbert")]
    for ours, _ in pairs:
        saccade.optimize(ours.eval())
    wrong = []

    def work(ours, theirs, seed):
        for step in range(8):
            ids, mask = padded((5, 9, 2 + step), seed=seed + step)
            real = mask.bool()
            with torch.no_grad():
                if not torch.allclose(
                    ours(input_ids=ids, attention_mask=mask)[0][real], theirs(input_ids=ids, attention_mask=mask)[0][real]
                ):
                    wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(*pair, 10 * i)) for i, pair in enumerate((*pairs, *pairs)) if pair[1].eval()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_calls_run_as_stock():
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    ids, mask = padded((5, 9))
    with torch.no_grad():
        found = torch.compile(ours, backend="eager")(input_ids=ids, attention_mask=mask)[0]
        torch.testing.assert_close(found[mask.bool()], theirs.eval()(ids, mask)[0][mask.bool()])
    assert handle.active


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_stock(strict):
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval(), fuse=False)
    ids, mask = padded((5, 9))
    with torch.no_grad():
        found = torch.export.export(ours, (ids, mask), strict=strict).module()(ids, mask)[0]
        torch.testing.assert_close(found[mask.bool()], theirs.eval()(ids, mask)[0][mask.bool()])
    assert handle.active


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_of_torch_func_are_stock(transform):
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    ids, mask = padded((5, 9))

    def result(model):
        def loss(parameters):
            return torch.func.functional_call(model, parameters, (ids, mask))[0][mask.bool()].square().sum()

        if transform == "vmap":
            return torch.func.vmap(lambda row: model(row[None])[0])(ids)
        return torch.func.grad(loss)({name: x.detach() for name, x in model.named_parameters()})

    with torch.no_grad():
        torch.testing.assert_close(result(ours), result(theirs.eval()))
    assert "torch.func" in handle.served[0].last


def test_a_counter_of_flops_sees_what_stock_computes():
    """A replay of a CUDA graph would show it nothing."""
    ours, theirs = made("bert")
    handle = saccade.optimize(ours.eval())
    counts = []
    for model in (ours, theirs.eval()):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*padded((5, 9)))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert "TorchDispatchMode" in handle.served[0].last


def test_under_data_parallelism(tmp_path):
    import torch.distributed as dist

    ours, theirs = made("bert")
    saccade.optimize(ours.eval())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(ours, find_unused_parameters=True)
        ids, mask = padded((5, 9))
        for model in (parallel, theirs.eval()):
            model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()].square().sum().backward()
    finally:
        dist.destroy_process_group()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-9)


def test_parameters_of_another_type_run_without_graphs():
    class Weight(torch.nn.Parameter):
        pass

    ours, theirs = made("bert")
    ours.encoder.layer[0].output.dense.weight = Weight(ours.encoder.layer[0].output.dense.weight.detach())
    ours.encoder.layer[0].output.dense.weight.__class__ = Weight
    handle = saccade.optimize(ours.eval())
    handle.served[0].state.read()
    assert handle.served[0].state.watched == "its parameters are of the type Weight"
    batch = padded((5, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(*batch)[0][batch[1].bool()], theirs.eval()(*batch)[0][batch[1].bool()])
