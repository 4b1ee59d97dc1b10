"""Batches whose position ids restart: causal models run `attention_varlen`, and who computes with the mask finds it formed."""

import copy

import pytest
import torch

import saccade
from saccade.integrations import mask_functions, packed_mask
from saccade.integrations import transformers as integration
from saccade.integrations.packed_mask import PackedMask

transformers = pytest.importorskip("transformers")

ROW = [0, 1, 2, 3, 0, 1, 2, 3, 4]
ROWS = [ROW, [3, 4, 5, 0, 0, 1, 2, 0, 1]]  # sequences of one token, and one that does not begin at 0
NUMBERS = [[0] * 4 + [1] * 5, [0] * 3 + [1] + [2] * 3 + [3] * 2]
LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def _registered():
    saccade.integrations.transformers.register()


@pytest.fixture
def runs(monkeypatch):
    """The numbers of sequences in the calls of `attention_varlen`."""
    found = []

    def attend(call, *others):
        ends = call[3]
        found.append(len(ends) - 1)
        return attend_packed(call, *others)

    attend_packed = integration.attend_packed
    monkeypatch.setattr(integration, "attend_packed", attend)
    return found


def pair(kind="Llama", theirs="sdpa", **more):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=LAYERS,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0, **more,
    )  # fmt: skip
    made = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    # a copy, as models that share a config share its attention
    theirs = made._from_config(copy.deepcopy(config), attn_implementation=theirs).double().eval()
    ours = made._from_config(config, attn_implementation="saccade").double().eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def batch(rows):
    positions = torch.tensor(rows)
    ids = torch.randint(2, 60, positions.shape, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def outputs(model, **inputs):
    logits = model(**inputs).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    return [logits, *torch.autograd.grad((logits * weights).sum(), list(model.parameters()))]


def same(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def layer_inputs(batch=2, tokens=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, tokens, 16, generator=generator, dtype=dtype) for heads in (4, 2, 2)]


class Causal(torch.nn.Module):
    is_causal = True


def block_mask():
    numbers = torch.tensor(NUMBERS)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]) & torch.ones(9, 9, dtype=torch.bool).tril()


# the eager softmax of transformers is float32, whatever the model is
@pytest.mark.parametrize(("theirs", "tolerance"), [("sdpa", 1e-9), ("eager", 1e-4)])
@pytest.mark.parametrize(("rows", "sequences"), [([ROW], 2), (ROWS, 6)])
def test_outputs_and_gradients_of_packed_rows(rows, sequences, theirs, tolerance, runs):
    ours, stock = pair(theirs=theirs)
    expected = outputs(stock, **batch(rows))
    assert not runs
    same(outputs(ours, **batch(rows)), expected, tolerance)
    assert runs == [sequences] * LAYERS


@pytest.mark.parametrize("lengths", [(5, 1, 3), (4, 4)])
def test_sequences_give_what_each_gives_alone(lengths, runs):
    ours, _ = pair()
    sequences = [torch.randint(2, 60, (n,)).tolist() for n in lengths]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    inputs = collate([{"input_ids": tokens} for tokens in sequences])
    del inputs["labels"]
    packed = ours(**inputs, use_cache=False).logits[0]
    assert runs == [len(lengths)] * LAYERS
    alone = torch.cat([ours(torch.tensor([tokens])).logits[0] for tokens in sequences])
    torch.testing.assert_close(packed, alone)


def test_the_ends_are_found_once_for_a_batch(monkeypatch, runs):
    """Each time waits for the device."""
    times = []
    find = packed_mask._ends
    monkeypatch.setattr(packed_mask, "_ends", lambda numbers: times.append(1) or find(numbers))
    model, _ = pair()
    model(**batch(ROWS))
    assert len(runs) == LAYERS
    assert times == [1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant):
    """A reentrant checkpoint detaches the mask, which forms it."""
    ours, theirs = pair()
    expected = outputs(theirs, **batch(ROWS))
    ours.train()
    enable = getattr(ours, "activation_checkpointing_enable", None) or ours.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    logits = ours(**batch(ROWS)).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)).sum().backward()
    same([logits, *(parameter.grad for parameter in ours.parameters())], expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled(part):
    ours, theirs = pair()
    expected = theirs(**batch(ROWS)).logits
    for module in [ours] if part == "model" else ours.model.layers:
        module.compile(fullgraph=True, backend="aot_eager")
    same(ours(**batch(ROWS)).logits, expected)


def test_a_window_is_that_of_each_sequence(runs):
    ours, theirs = pair("Mistral", sliding_window=3, head_dim=8)
    same(outputs(ours, **batch(ROWS)), outputs(theirs, **batch(ROWS)))
    assert runs == [6] * LAYERS


def test_a_mask_with_a_window_is_formed():
    arguments = {"inputs_embeds": torch.zeros(2, 9, 32), "attention_mask": None, "past_key_values": None}
    masks = [
        transformers.masking_utils.create_sliding_window_causal_mask(model.config, position_ids=torch.tensor(ROWS), **arguments)
        for model in pair("Mistral", sliding_window=3, head_dim=8)
    ]
    assert (type(masks[0]), masks[0].window) == (PackedMask, (2, None))
    assert copy.deepcopy(masks[0]).window == (2, None)
    assert torch.equal(masks[0].formed(), masks[1])


@pytest.mark.parametrize("more", ["and_mask_function", "or_mask_function", "block_sequence_ids"])
def test_a_mask_of_more_than_packing_is_formed(more):
    ours, theirs = pair()
    change = torch.tensor([[-1, 1, 1] * 3] * 2) if more == "block_sequence_ids" else lambda b, h, q, k: k % 2 == 0
    arguments = {"inputs_embeds": torch.zeros(2, 9, 32), "attention_mask": None, "past_key_values": None, more: change}
    masks = [
        transformers.masking_utils.create_causal_mask(model.config, position_ids=torch.tensor(ROWS), **arguments)
        for model in (ours, theirs)
    ]
    assert type(masks[0]) is torch.Tensor
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], block_mask())


def test_operations_form_the_mask():
    mask = PackedMask(torch.tensor(NUMBERS))
    assert (mask.shape, mask.dtype) == ((2, 1, 9, 9), torch.bool)
    assert mask.longest == 5
    assert mask.ends.tolist() == [0, 4, 9, 12, 13, 16, 18]
    found = mask[:, :, 2:]
    assert type(found) is torch.Tensor
    assert torch.equal(found, block_mask()[:, :, 2:])
    assert torch.equal(mask | False, block_mask())
    assert torch.equal(mask.sum(-1, dtype=torch.float64), block_mask().sum(-1).double())  # keywords are handed on
    assert mask.sum(-1, dtype=torch.float64).dtype == torch.float64


def test_a_mask_that_a_model_has_changed_counts_as_it_is(runs):
    mask, expected = PackedMask(torch.tensor(NUMBERS)), block_mask()
    for x in (mask, expected):
        x[..., 1:, 0] = False
        x[..., 1:, 8] = True
    calls = [integration.attention_forward(Causal(), *layer_inputs(), x)[0] for x in (mask, expected)]
    torch.testing.assert_close(*calls)
    assert not runs


def test_a_position_bias_takes_the_mask(runs):
    inputs = layer_inputs()
    bias = torch.randn(1, 4, 9, 9, dtype=inputs[0].dtype)
    masks = PackedMask(torch.tensor(NUMBERS)), block_mask()
    found, expected = (integration.attention_forward(Causal(), *inputs, mask, position_bias=bias)[0] for mask in masks)
    torch.testing.assert_close(found, expected)
    assert not runs


def test_a_mask_of_other_sizes_is_refused_as_a_formed_one():
    query, key, value = layer_inputs(tokens=5)
    for mask in (PackedMask(torch.tensor(NUMBERS)), block_mask()):
        with pytest.raises(saccade.SaccadeError, match="9"):
            integration.attention_forward(Causal(), query, key, value, mask)


def test_a_backend_that_attention_varlen_has_not_takes_the_mask(runs):
    masks = PackedMask(torch.tensor(NUMBERS)), block_mask()
    found, expected = (
        integration.attention_forward(Causal(), *layer_inputs(dtype=torch.float32), mask, backend="short")[0] for mask in masks
    )
    torch.testing.assert_close(found, expected)
    assert not runs


def test_nm_sparse_attention_takes_the_mask(monkeypatch):
    masks = []
    monkeypatch.setattr(integration, "nm_sparse_attention", lambda *call, **rest: masks.append(call[3]) or call[0])
    integration.nm_sparse_forward(Causal(), *layer_inputs(), PackedMask(torch.tensor(NUMBERS)))
    assert type(masks[0]) is torch.Tensor  # kernels read its memory
    assert torch.equal(masks[0], block_mask())


def functions_of_masks():
    """name -> a function like that of packed sequences, and whether it is the causal one of them alone; those that this release has."""
    code = transformers.masking_utils
    numbers, positions = torch.tensor(NUMBERS), torch.tensor(ROWS)
    apart = code.packed_sequence_mask_function(numbers)
    found = {
        "both masks": (code.and_masks(code.causal_mask_function, apart), True),
        "both masks, bidirectional": (code.and_masks(code.bidirectional_mask_function, apart), False),
        "apart alone": (apart, False),
        "causal without packing": (code.causal_mask_function, False),
    }
    if not hasattr(code, "packed_sequence_compatibility_function"):
        return found
    causal = code.remap_positions_for_packed_sequence(code.causal_mask_function, positions)
    both = code.packed_sequence_compatibility_function
    return found | {
        "causal": (both(code.causal_mask_function, positions, numbers), True),
        "bidirectional": (both(code.bidirectional_mask_function, positions, numbers), False),
        "window": (both(code.sliding_window_causal_mask_function(3), positions, numbers), True),
        "one or the other": (code.or_masks(apart, causal), False),
        "a third": (code.and_masks(apart, causal, code.bidirectional_mask_function), False),
    }


@pytest.mark.parametrize("name", functions_of_masks())
def test_the_one_function_is_known(name):
    function, known = functions_of_masks()[name]
    made = packed_mask.packed_mask(function, None, 9, 9)
    assert (made is not None) == known
    assert packed_mask.packed_mask(function, torch.ones(2, 9, dtype=torch.bool), 9, 9) is None
    assert packed_mask.packed_mask(function, None, 9, 12) is None


def test_functions_over_other_numbers_are_others():
    def over(number):
        return lambda: number

    assert mask_functions.fits(over(3), over(3), {})
    assert not mask_functions.fits(over(4), over(3), {})


def test_a_mask_is_copied_and_shared():
    mask = PackedMask(torch.tensor(NUMBERS))
    made = copy.deepcopy([mask, mask])
    assert made[0] is made[1] is not mask
    assert made[0].ends is not mask.ends
    assert made[0]._formed is None
    assert torch.equal(made[0].formed(), mask.formed())
    changed = copy.deepcopy(mask)
    assert changed._formed is not mask._formed
    assert PackedMask(torch.tensor(NUMBERS)).share_memory_().numbers.is_shared()
