"""Run by a test: `in_transformers.py NAME MODEL` makes models of transformers with `attn_implementation=NAME`, a name of the kernels hub,
and a model of sentence-transformers of the weights in the folder MODEL, if that is given."""

from __future__ import annotations

import inspect
import sys

import torch
from transformers.utils import import_utils

NAME = sys.argv[1]
# transformers 5.23 asks for kernels 0.18.2, and package indices may have only 0.17.2, which loads kernels the same way: the least
# version alone is lowered, before the modules are imported that ask for it
inspect.unwrap(import_utils.is_kernels_available).__defaults__ = ("0.17", import_utils.KERNELS_MAX_VERSION)
assert import_utils.is_kernels_available()

from transformers import BertConfig, BertModel, GptOssConfig, GptOssModel  # noqa: E402
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention  # noqa: E402

CALLS: list[str] = []


def counted(function):
    """The function, which transformers keeps for the calls to come, and its name in CALLS."""

    def call(*args, **kwargs):
        CALLS.append(function.__name__)
        return function(*args, **kwargs)

    call.__signature__ = inspect.signature(function)
    return call


def bert(attention: str) -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    # weights so large that tokens attend to some keys more than to others
    config = BertConfig(vocab_size=64, initializer_range=0.3, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **sizes)
    return BertModel._from_config(config, attn_implementation=attention)


def functions_are_those_of_the_copy():
    (_, varlen, *_), _ = lazy_import_flash_attention(NAME)
    assert varlen.__module__.startswith("_saccade_universal_"), varlen.__module__


def padded_batches_agree_with_torch():
    stock, ours = bert("sdpa"), bert(NAME)
    assert ours.config._attn_implementation == NAME
    ids, mask = torch.randint(0, 64, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = mask[2, 2:] = 0
    real = mask.bool()
    results = []
    for model in (stock, ours):
        hidden = model(ids, attention_mask=mask).last_hidden_state[real]
        hidden.square().sum().backward()
        results.append((hidden, model.embeddings.word_embeddings.weight.grad))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # the mask matters to this model
    assert not torch.allclose(stock(ids).last_hidden_state[real], results[0][0], atol=1e-2)
    torch.testing.assert_close(ours(ids).last_hidden_state, stock(ids).last_hidden_state, rtol=1e-4, atol=1e-4)


def packed_batches_agree_with_torch():
    stock, ours = bert("sdpa").eval(), bert(NAME).eval()
    parts = [torch.randint(0, 64, (1, n)) for n in (4, 7, 1)]
    ends = torch.tensor([0, 4, 11, 12], dtype=torch.int32)
    with torch.no_grad():
        wanted = torch.cat([stock(part).last_hidden_state for part in parts], 1)
        found = ours(
            torch.cat(parts, 1), position_ids=torch.cat([torch.arange(p.shape[1]) for p in parts])[None],
            cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7,
        ).last_hidden_state  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def sinks_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    small = {"intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64}
    model = GptOssModel._from_config(GptOssConfig(**sizes, **small), attn_implementation="eager")
    # this model changes names that contain "flash" for its own kernel
    model.config._attn_implementation_internal = NAME
    message = ""
    try:
        model(torch.randint(0, 64, (1, 5)), use_cache=False)
    except ValueError as error:
        message = str(error)
    assert "s_aux is given" in message, message


def sentences_are_unpadded(folder: str):
    from sentence_transformers import SentenceTransformer
    from transformers import modeling_flash_attention_utils as utils

    sentences = [
        "Short.",
        "A sentence with more words than the other one has, so that one of them would be padded.",
        "A third one.",
    ]
    found = {}
    for name in ("sdpa", NAME):
        model = SentenceTransformer(folder, model_kwargs={"attn_implementation": name}, local_files_only=True, device="cpu")
        assert model[0].can_flatten_inputs is (name == NAME)
        if name == NAME:
            utils._flash_varlen_fn = counted(utils._flash_varlen_fn)
        found[name] = torch.from_numpy(model.encode(sentences))
    assert ["flash_attn_varlen_func"] * model[0].config.num_hidden_layers == CALLS, CALLS
    assert torch.cosine_similarity(found["sdpa"], found[NAME]).min() > 0.99999


for check in (
    functions_are_those_of_the_copy, padded_batches_agree_with_torch, packed_batches_agree_with_torch, sinks_are_refused
):  # fmt: skip
    check()
    print("passed:", check.__name__)
if len(sys.argv) > 2:
    sentences_are_unpadded(sys.argv[2])
    print("passed: sentences_are_unpadded")
