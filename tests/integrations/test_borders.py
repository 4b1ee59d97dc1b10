"""Packed sequences stay apart whatever comes beside their borders, and no argument of an integration is dropped."""

import inspect
import itertools

import pytest
import torch
import transformers
from torch import nn

from saccade import UnsupportedProblem
from saccade.integrations.transformers import attention_forward, nm_sparse_forward, register, register_nm_sparse

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# lengths in which groups of four keys begin where a sequence does
LENGTHS = 8, 12


@pytest.fixture(autouse=True)
def _registered():
    register()
    register_nm_sparse()
    torch.manual_seed(0)


def model(name, implementation="saccade"):
    if name == "ModernBERT":
        config = transformers.ModernBertConfig(
            **SIZES, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=8
        )
        return transformers.ModernBertModel._from_config(config, attn_implementation=implementation).eval()
    if name == "EmbeddingGemma":
        config = transformers.Gemma3TextConfig(
            **SIZES, num_key_value_heads=2, head_dim=16, use_bidirectional_attention=True, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        return transformers.Gemma3TextModel._from_config(config, attn_implementation=implementation).eval()
    window = {"sliding_window": 4} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, **window)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation).eval()


def rows():
    return [torch.randint(3, 100, (1, length)) for length in LENGTHS]


def packed(sequences):
    return {
        "input_ids": torch.cat(sequences, 1),
        "position_ids": torch.cat([torch.arange(x.shape[1]) for x in sequences])[None],
    }


def ends():
    return torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)


def borders():
    return {"cu_seq_lens_q": ends(), "cu_seq_lens_k": ends(), "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}


@pytest.mark.parametrize("ones", [False, True], ids=["no mask", "mask of ones"])
@pytest.mark.parametrize("implementation", ["saccade", "saccade_nm"])
@pytest.mark.parametrize("name", ["ModernBERT", "EmbeddingGemma", "Mistral", "Llama"])
def test_borders_beside_windows(name, implementation, ones):
    encoder, sequences = model(name, implementation), rows()
    mask = {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)} if ones else {}
    with torch.no_grad():
        together = encoder(**packed(sequences), **borders(), **mask)[0]
        alone = torch.cat([encoder(x)[0] for x in sequences], 1)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", ["saccade", "saccade_nm"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_positions_that_restart_are_borders(use_cache, implementation):
    decoder, sequences = model("Llama", implementation), rows()
    with torch.no_grad():
        together = decoder(**packed(sequences), use_cache=use_cache)[0]
        alone = torch.cat([decoder(x)[0] for x in sequences], 1)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)


def test_positions_are_read_anew_after_a_change():
    decoder, sequences = model("Llama"), rows()
    batch = packed(sequences)
    with torch.no_grad():
        decoder(**batch)
        batch["position_ids"].copy_(torch.arange(sum(LENGTHS)))
        torch.testing.assert_close(decoder(**batch)[0], decoder(batch["input_ids"])[0], atol=2e-5, rtol=2e-5)


def test_positions_of_inference_mode_are_read_anew():
    decoder, sequences = model("Llama"), rows()
    with torch.inference_mode():
        batch = packed(sequences)
        decoder(**batch)
        batch["position_ids"].copy_(torch.arange(sum(LENGTHS)))
        torch.testing.assert_close(decoder(**batch)[0], decoder(batch["input_ids"])[0], atol=2e-5, rtol=2e-5)


def called(positions, batch, layer_idx):
    """A layer's output, and what it is of the sequences by themselves."""
    module, inputs = Layer(), [torch.randn(batch, 2, sum(LENGTHS), 8) for _ in range(3)]
    module.layer_idx = layer_idx
    found = attention_forward(module, *inputs, None, is_causal=True, position_ids=positions)[0]
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), positions.shape[1]]
    alone = [[x[:, :, a:b] for x in inputs] for a, b in itertools.pairwise(starts)]
    whole = [nn.functional.scaled_dot_product_attention(*parts, is_causal=True) for parts in alone]
    return found, torch.cat(whole, 2).transpose(1, 2)


@pytest.mark.parametrize("batches", [(3, 1, 2), (1, 3), (0, 2)], ids=str)
def test_positions_of_one_row_serve_batches_of_any_size(batches):
    positions = packed(rows())["position_ids"]
    for batch in batches:
        torch.testing.assert_close(*called(positions, batch, 0))


def test_the_first_layer_with_attention_reads_positions_of_inference_mode_anew():
    """In hybrid models it is not layer 0."""
    with torch.inference_mode():
        positions = packed(rows())["position_ids"]
        for row in (positions.clone(), torch.arange(sum(LENGTHS)), positions.clone()):
            positions.copy_(row)
            for layer in (3, 7):
                torch.testing.assert_close(*called(positions, 1, layer))


def test_an_exported_encoder_keeps_its_borders():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.BertConfig(**SIZES)
            self.bert = transformers.BertModel._from_config(config, attn_implementation="saccade", add_pooling_layer=False).eval()

        def forward(self, input_ids, position_ids, ends):
            found = self.bert(
                input_ids=input_ids, position_ids=position_ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(LENGTHS),
                max_length_k=max(LENGTHS),
            )  # fmt: skip
            return found.last_hidden_state

    encoder, sequences = Packed(), rows()
    batch = packed(sequences)
    with torch.no_grad():
        given = (batch["input_ids"], batch["position_ids"], ends())
        exported = torch.export.export(encoder, given).module()
        alone = torch.cat([encoder.bert(x).last_hidden_state for x in sequences], 1)
        torch.testing.assert_close(exported(*given), alone, atol=2e-5, rtol=2e-5)


class Layer(nn.Module):
    is_causal = False


def layer_call(forward, **arguments):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(LENGTHS), 8, generator=generator) for _ in range(3))
    torch.manual_seed(1)
    return forward(Layer(), q, k, v, **{"attention_mask": None, "is_causal": True} | arguments)[0]


# an argument -> a value that has to change the result or be refused, and what is given beside it
CHANGES = {
    "attention_mask": (torch.rand(1, 1, sum(LENGTHS), sum(LENGTHS)) > 0.5, {}),
    "dropout": (0.5, {}),
    "scaling": (0.01, {}),
    "is_causal": (False, {}),
    "position_bias": (torch.rand(1, 2, sum(LENGTHS), sum(LENGTHS)), {}),
    "sliding_window": (3, {}),
    "cu_seq_lens_q": (ends(), {}),
    "cu_seq_lens_k": (torch.tensor([0, 2, sum(LENGTHS)], dtype=torch.int32), {"cu_seq_lens_q": ends()}),
    "position_ids": (packed(rows())["position_ids"], {}),
    "backend": ("no such", {}),
    "pattern": ("1:4", {}),
    "dense_first": (8, {}),
    "dense_recent": (8, {}),
    **{name: (torch.ones(1), {}) for name in ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache")},
}
# bounds, which change no result that is right, and what the protocol hands over beside the call
NO_CHANGE = {"module", "query", "key", "value", "max_length_q", "max_length_k", "output_attentions", "kwargs"}


@pytest.mark.parametrize("forward", [attention_forward, nm_sparse_forward], ids=["saccade", "saccade_nm"])
def test_no_argument_is_dropped(forward):
    from saccade.integrations.transformers import _UNSUPPORTED

    names = [x for x in inspect.signature(forward).parameters if x not in NO_CHANGE] + list(_UNSUPPORTED)
    assert set(names) <= set(CHANGES), "a new argument needs a value here"
    for name in names:
        value, beside = CHANGES[name]
        if name == "cu_seq_lens_k" and forward is nm_sparse_forward:
            beside = {**beside, "is_causal": False}
        before = layer_call(forward, **beside)
        try:
            after = layer_call(forward, **beside, **{name: value} if name != "is_causal" else {"is_causal": value})
        except (UnsupportedProblem, ValueError):
            continue
        assert not torch.equal(before, after), name


@pytest.mark.parametrize("forward", [attention_forward, nm_sparse_forward], ids=["saccade", "saccade_nm"])
@pytest.mark.parametrize("form", ["whole", "floating", "of keys", "bias"])
def test_borders_are_combined_with_a_mask_or_bias(form, forward):
    tokens = sum(LENGTHS)
    bool_mask = torch.rand(1, 1, tokens, tokens) > 0.3
    bool_mask |= torch.eye(tokens, dtype=torch.bool)
    beside = {
        "whole": {"attention_mask": bool_mask},
        "floating": {"attention_mask": torch.randn(1, 1, tokens, tokens)},
        "of keys": {"attention_mask": torch.rand(1, tokens) > 0.2},
        "bias": {"position_bias": torch.randn(1, 2, tokens, tokens)},
    }[form]
    same = torch.block_diag(*[torch.ones(n, n) for n in LENGTHS]).bool()
    if form in ("of keys", "bias"):
        same = same.tril()  # such a layer stays causal
    if form == "of keys":
        by_hand = {"attention_mask": beside["attention_mask"][:, None, None] & same}
    elif form == "whole":
        by_hand = {"attention_mask": bool_mask & same}
    else:
        by_hand = {"attention_mask": torch.where(same, next(iter(beside.values())), float("-inf"))}
    found, expected = layer_call(forward, **beside, cu_seq_lens_q=ends()), layer_call(forward, **by_hand)
    torch.testing.assert_close(found, expected)


def test_borders_of_several_rows_are_refused():
    q = torch.randn(2, 2, 20, 8)
    with pytest.raises(UnsupportedProblem, match="batch of 2 rows"):
        attention_forward(Layer(), q, q, q, torch.ones(2, 1, 20, 20, dtype=torch.bool), cu_seq_lens_q=ends())


@pytest.mark.parametrize("ends", [[0, 5], [0, 2, 5]], ids=str)
def test_ends_of_queries_are_not_those_of_more_keys(ends):
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16)
    with pytest.raises(UnsupportedProblem, match="5 queries, but there are 9 keys; pass cu_seq_lens_k for them"):
        attention_forward(nn.Module(), query, key, key, None, is_causal=False, cu_seq_lens_q=torch.tensor(ends))
