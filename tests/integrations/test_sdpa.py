"""`saccade.replace_sdpa`: what it reaches, what it leaves to torch, and that it is undone."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.integrations import sdpa as integration

TORCHS = F.scaled_dot_product_attention
SRC = Path(saccade.__file__).parent


@pytest.fixture(autouse=True)
def _nothing_stays_replaced():
    assert F.scaled_dot_product_attention is TORCHS
    yield
    assert F.scaled_dot_product_attention is TORCHS
    assert integration._process.wanted == 0


@pytest.fixture
def reached(monkeypatch):
    """The shapes of the queries that arrive at `saccade.attention` in the place of torch's function."""
    shapes = []

    def attention(query, *rest):
        shapes.append(tuple(query.shape))
        return saccade.attention(query, *rest)

    monkeypatch.setattr(integration, "attention", attention)
    return shapes


def gradients(call, leaves):
    """The output of a call, and the gradients of a loss that weights every number of it differently."""
    out = call()
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]


def compare(call, leaves, seed=0):
    """A call under torch's function and under ours: outputs and gradients."""
    torch.manual_seed(seed)
    expected = gradients(call, leaves)
    with saccade.replace_sdpa():
        torch.manual_seed(seed)
        found = gradients(call, leaves)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def qkv(*shape):
    return torch.randn(3, *shape).unbind(0)


# --- replaced, and put back


def test_a_block_runs_our_function_and_restores(reached):
    q, k, v = qkv(2, 4, 7, 8)
    expected = F.scaled_dot_product_attention(q, k, v)
    with saccade.replace_sdpa() as replacement:
        assert replacement.active
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(q, key=k, value=v), expected)
    assert not replacement.active
    F.scaled_dot_product_attention(q, k, v)
    assert reached == [(2, 4, 7, 8)] * 2


def test_a_handle_restores_when_it_is_asked_and_once():
    replacement = saccade.replace_sdpa()
    assert F.scaled_dot_product_attention is not TORCHS
    assert repr(replacement) == "<saccade.replace_sdpa(): active>"
    replacement.restore()
    replacement.restore()
    assert F.scaled_dot_product_attention is TORCHS
    assert repr(replacement) == "<saccade.replace_sdpa(): restored>"
    with pytest.raises(saccade.SaccadeError, match="was restored; make another"):
        replacement.__enter__()


def test_an_exception_restores():
    with pytest.raises(ZeroDivisionError), saccade.replace_sdpa():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCHS


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_of_nested_replacements_restores(order):
    handles = [saccade.replace_sdpa() for _ in range(3)]
    for number in order:
        assert F.scaled_dot_product_attention is integration.scaled_dot_product_attention
        handles[number].restore()
    assert F.scaled_dot_product_attention is TORCHS


def test_what_stood_there_before_comes_back(monkeypatch):
    def another(*args, **kwargs):
        return TORCHS(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", another)
        with saccade.replace_sdpa():
            assert F.scaled_dot_product_attention is integration.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is another


def test_another_library_s_function_is_not_undone(monkeypatch):
    def another(*args, **kwargs):
        return TORCHS(*args, **kwargs)

    replacement = saccade.replace_sdpa()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", another)
        with pytest.raises(saccade.SaccadeError, match="another, which took its place after"):
            replacement.restore()
        with pytest.raises(saccade.SaccadeError, match="would not reach the calls"):
            saccade.replace_sdpa()
        assert F.scaled_dot_product_attention is another
        assert replacement.active
    replacement.restore()


def test_torch_s_function_put_back_by_somebody_counts_as_restored():
    first = saccade.replace_sdpa()
    F.scaled_dot_product_attention = TORCHS
    second = saccade.replace_sdpa()
    assert F.scaled_dot_product_attention is integration.scaled_dot_product_attention
    F.scaled_dot_product_attention = TORCHS
    first.restore()
    second.restore()
    assert F.scaled_dot_product_attention is TORCHS
    with saccade.replace_sdpa():
        assert F.scaled_dot_product_attention is integration.scaled_dot_product_attention


def test_threads_replace_and_restore_without_losing_count():
    q, k, v = qkv(1, 2, 3, 8)
    expected = TORCHS(q, k, v)
    failures, barrier = [], threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(200):
            with saccade.replace_sdpa():
                if F.scaled_dot_product_attention is not integration.scaled_dot_product_attention:
                    failures.append("not replaced inside the block")
                if not torch.equal(F.scaled_dot_product_attention(q, k, v), expected):
                    failures.append("another result")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_library_knows_torch_s_function_from_its_import_on():
    """A look-up in a function would find what stands there at the time, which calls the library again. So one file binds it, and no other names
    it, but the one that puts another in its place."""
    named = []
    for path in SRC.rglob("*.py"):
        tree = ast.parse(path.read_text())
        at_import = {id(node.value) for node in tree.body if isinstance(node, ast.Assign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "scaled_dot_product_attention":
                named.append((path.relative_to(SRC).as_posix(), id(node) in at_import))
    assert ("engine/torch_sdpa.py", True) in named
    assert {path for path, _ in named} <= {"engine/torch_sdpa.py", "integrations/sdpa.py"}


# --- the meaning of a call


def test_the_signature_is_torch_s():
    parameters = inspect.signature(integration.scaled_dot_product_attention).parameters.values()
    documented = re.search(r"scaled_dot_product_attention\((.*?)\)", TORCHS.__doc__.replace("\n", " "))[1].split(",")
    theirs = [part.strip().partition("=")[0] for part in documented if part.strip() != "*"]
    assert [p.name for p in parameters] == theirs
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["scale", "enable_gqa"]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(7, 7).tril().bool()}, {"attn_mask": torch.randn(4, 1, 7)}],
    ids=["plain", "causal", "scale", "mask", "bias"],
)
def test_outputs_and_gradients(options, reached):
    leaves = [x.requires_grad_() for x in qkv(2, 4, 7, 8)]
    compare(lambda: F.scaled_dot_product_attention(*leaves, **options), leaves)
    assert len(reached) == 1


def test_grouped_heads(reached):
    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 7, 8).unbind(0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compare(lambda: F.scaled_dot_product_attention(*leaves, enable_gqa=True), leaves)
    assert len(reached) == 1


def test_a_mask_beside_is_causal_runs_torch_s_function():
    q, k, v = qkv(2, 4, 7, 8)
    mask = torch.rand(7, 7) < 0.9
    try:
        expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    except RuntimeError as refused:  # from torch 2.15 on
        with saccade.replace_sdpa(), pytest.raises(RuntimeError, match=re.escape(str(refused))):
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
        return
    with saccade.replace_sdpa():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, mask, is_causal=True), expected)


def test_what_torch_refuses_too_is_torch_s_error():
    q, k, v = qkv(2, 4, 7, 8)
    with saccade.replace_sdpa(), pytest.raises(RuntimeError, match=r"expanded size|must match|broadcast"):
        F.scaled_dot_product_attention(q, k, v, torch.ones(5, 3, dtype=torch.bool))


def test_no_tensor_is_torch_s_error_too():
    x = torch.randn(1, 2, 4, 8)
    with saccade.replace_sdpa(), pytest.raises(TypeError, match=r"argument 'query' .* must be Tensor, not NoneType"):
        F.scaled_dot_product_attention(None, x, x)


def test_transformations_of_torch_func(reached):
    q, k, v = qkv(3, 2, 4, 7, 8)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.func.vmap(torch.func.grad(loss))(q, k, v)
        _, tangent = torch.func.jvp(loss, (q, k, v), (q, k, v))
        with saccade.replace_sdpa():
            torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(q, k, v), expected)
            torch.testing.assert_close(torch.func.jvp(loss, (q, k, v), (q, k, v))[1], tangent)
    assert reached == []


def test_calls_inside_forward_mode_are_torch_s(reached):
    x = torch.randn(1, 2, 5, 8)
    with torch.autograd.forward_ad.dual_level(), saccade.replace_sdpa():
        F.scaled_dot_product_attention(x, x, x)
    assert reached == []
    with saccade.replace_sdpa():
        F.scaled_dot_product_attention(x, x, x)
    assert reached == [(1, 2, 5, 8)]


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_biases_of_torch(variant, reached):
    from torch.nn.attention import bias

    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, 9, 8).unbind(0)
    mask = getattr(bias, variant)(5, 9)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compare(lambda: F.scaled_dot_product_attention(*leaves, mask), leaves)
    assert len(reached) == 1  # the call that torch's bias makes of its own


@pytest.mark.unpoisoned
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("keys", [9, 5])
def test_causal_biases_of_torch_compile_to_one_graph(variant, keys):
    from torch.nn.attention import bias

    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, keys, 8).unbind(0)
    mask = getattr(bias, variant)(5, keys)

    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    expected = attend(q, k, v, mask)
    for again in (True, False):  # torch's own function is compiled right afterwards
        torch._dynamo.reset()
        with saccade.replace_sdpa() if again else contextlib.nullcontext():
            compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(q, k, v, mask), expected)


def test_a_program_that_is_compiled_first_inside_a_block_does_not_change_torch_s_function():
    """torch lists what subclasses may override once in a process; a list made inside the block would be without torch's function."""
    program = """
import torch, torch.nn.functional as F, saccade
from torch.nn.attention.bias import causal_upper_left
q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
attend = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
for block in (True, False):
    with saccade.replace_sdpa() if block else torch.no_grad():
        torch._dynamo.reset()
        out = torch.compile(attend, backend="aot_eager")(q, k, v, causal_upper_left(16, 16))
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_choice_of_kernels_is_torch_s_to_follow(reached):
    q, k, v = qkv(2, 4, 7, 8)
    expected = F.scaled_dot_product_attention(q, k, v)
    every = [torch.nn.attention.SDPBackend(i) for i in (0, 1, 2, 3)]
    for allowed in ([every[0]], every[:3], every[1:]):
        with saccade.replace_sdpa(), torch.nn.attention.sdpa_kernel(allowed):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
    assert reached == []
    with saccade.replace_sdpa(), torch.nn.attention.sdpa_kernel(every):
        F.scaled_dot_product_attention(q, k, v)
    assert len(reached) == 1


@pytest.mark.unpoisoned
def test_a_choice_of_kernels_inside_a_compiled_function(reached):
    q, k, v = qkv(2, 4, 7, 8)

    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    with saccade.replace_sdpa():
        torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q, k, v), attend(q, k, v))
    assert reached == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_under_a_chosen_kernel_a_result_lies_as_torch_lays_it(order):
    sizes = (2, 3, 5)
    q = torch.randn(*[sizes[i] for i in order], 8).permute(*[order.index(i) for i in range(3)], 3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        expected = F.scaled_dot_product_attention(q, q, q)
        with saccade.replace_sdpa():
            assert F.scaled_dot_product_attention(q, q, q).stride() == expected.stride()


def test_a_subclass_keeps_its_meaning_and_a_default_device_is_none(reached):
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "mine" if func is TORCHS else super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = qkv(2, 4, 7, 8)
    with saccade.replace_sdpa():
        assert F.scaled_dot_product_attention(q.as_subclass(Mine), k, v) == "mine"
        assert reached == []
        with torch.device("cpu"):
            F.scaled_dot_product_attention(q, k, v)
        assert len(reached) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout):
    parts = [torch.randn(length, 4, 8) for length in (3, 5)]
    if layout == torch.strided:  # without gradients torch takes it contiguous alone
        parts = [part.transpose(0, 1).contiguous() for part in parts]
        nested = torch.nested.nested_tensor(parts, layout=layout)
    else:
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with saccade.replace_sdpa():
        out = F.scaled_dot_product_attention(nested, nested, nested)
    assert out.layout == layout
    for got, want in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_second_derivatives_under_the_math_kernel(reached):
    query = torch.randn(2, 4, 7, 8, device="cuda", requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(
            F.scaled_dot_product_attention(query, query, query).square().sum(), query, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), query)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = second()
        with saccade.replace_sdpa():
            torch.testing.assert_close(second(), expected)
    assert reached == []


@pytest.mark.gpu
def test_kernels_of_ours_run_on_a_gpu(reached):
    leaves = [torch.randn(512, 8, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    expected = gradients(lambda: F.scaled_dot_product_attention(*leaves), leaves)
    with saccade.replace_sdpa():
        found = gradients(lambda: F.scaled_dot_product_attention(*leaves), leaves)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert len(reached) == 1


@pytest.mark.unpoisoned
def test_compiled_graphs_follow():
    q, k, v = qkv(2, 4, 7, 8)
    compiled = torch.compile(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), backend="eager", fullgraph=True)
    expected = compiled()
    calls = []

    def count(*call):
        calls.append(call)
        return saccade.attention(*call)

    with pytest.MonkeyPatch.context() as patch, saccade.replace_sdpa():
        patch.setattr(integration, "attention", count)
        torch.testing.assert_close(compiled(), expected)
    assert calls
    calls.clear()
    torch.testing.assert_close(compiled(), expected)
    assert not calls


# --- modules of torch


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_multihead_attention(training, padded, causal, reached):
    module = nn.MultiheadAttention(32, 4, dropout=0.1 if training else 0.0, batch_first=True).train(training)
    x = torch.randn(3, 9, 32, requires_grad=True)
    padding = torch.arange(9) >= torch.tensor([9, 4, 6])[:, None] if padded else None
    mask = nn.Transformer.generate_square_subsequent_mask(9).isinf() if causal else None

    def call():
        return module(x, x, x, key_padding_mask=padding, need_weights=False, attn_mask=mask, is_causal=causal)[0]

    compare(call, [x, *module.parameters()])
    assert len(reached) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(training, norm_first, reached):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 9, 32, requires_grad=True)
    padding = torch.arange(9) >= torch.tensor([9, 4, 6])[:, None]
    compare(lambda: module(x, src_key_padding_mask=padding), [x, *module.parameters()])
    assert len(reached) == 2


@pytest.mark.parametrize("training", [True, False])
def test_transformer_decoder(training, reached):
    layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    module = nn.TransformerDecoder(layer, 2).train(training)
    x, memory = torch.randn(3, 9, 32, requires_grad=True), torch.randn(3, 6, 32, requires_grad=True)
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    padding = torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]

    def call():
        return module(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)

    compare(call, [x, memory, *module.parameters()])
    assert len(reached) == 4  # self and cross attention


def test_the_fast_path_of_torch_s_modules_is_reached_once_it_is_off(reached):
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 9, 32), torch.arange(9) >= torch.tensor([9, 4, 6])[:, None]
    with torch.no_grad(), saccade.replace_sdpa():
        fast = module(x, src_key_padding_mask=padding)
        assert reached == []
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = module(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(reached) == 2
    torch.testing.assert_close(slow[~padding], fast[~padding], rtol=1e-5, atol=1e-6)


def test_scripted_modules():
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True), 2)
    x = torch.randn(3, 9, 32)
    with saccade.replace_sdpa():
        scripted = torch.jit.script(module)
        torch.testing.assert_close(scripted(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0])
        torch.testing.assert_close(torch.jit.script(encoder)(x), encoder(x))
    assert "aten::scaled_dot_product_attention" in str(scripted.inlined_graph)


# --- models of transformers


@pytest.mark.parametrize("side", ["right", "left"])
def test_bert_padded(side, reached):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel._from_config(config, attn_implementation="sdpa").eval()
    tokens, lengths, position = torch.randint(2, 60, (3, 9)), torch.tensor([9, 1, 5])[:, None], torch.arange(9)
    mask = (position < lengths if side == "right" else position >= 9 - lengths).long()

    def call():
        return model(input_ids=tokens, attention_mask=mask).last_hidden_state[mask.bool()]

    compare(call, list(model.parameters()))
    assert len(reached) == 2


RELOADED = """
import importlib, sys
import torch.nn.functional as F
import saccade
original, module = F.scaled_dot_product_attention, sys.modules["saccade.integrations.sdpa"]
first = saccade.replace_sdpa()
importlib.reload(module)
with module.replace_sdpa():
    assert F.scaled_dot_product_attention is not original
assert F.scaled_dot_product_attention is not original  # the first handle still wants it
first.restore()
assert F.scaled_dot_product_attention is original
"""


def test_a_reload_leaves_the_replacement_to_be_restored():
    subprocess.run([sys.executable, "-c", RELOADED], check=True, timeout=300)
