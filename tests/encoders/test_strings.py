"""`encode` and `predict` of optimised models give what stock gives, for every option, and leave stock what they do not cover."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import os
import pickle
import random
import string
import sys
import threading

import numpy as np
import pytest
import tokenizers
import torch
import tqdm
import transformers
from encoders_made import SIZES
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.errors import InvalidArgument

sentence_transformers = pytest.importorskip("sentence_transformers")

WORDS = ["sea", "a", "hills", "dogs", "way", "of", "it", "cat"]
ODD = [
    "",
    " ",
    "a",
    "Z",
    "\n",
    "été",
    "日本語 テキスト",
    "שלום עולם",
    "🙂",
    "[PAD] a [SEP] b",
    "x" * 300,
    "a b " * 200,
    "\t tab  two  spaces ",
]
BERT = ("BertModel", "BertConfig", {})
QWEN = ("Qwen3Model", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8})
ROBERTA = ("XLMRobertaModel", "XLMRobertaConfig", {"pad_token_id": 0, "max_position_embeddings": 64})
CLASSIFIER = ("BertForSequenceClassification", "BertConfig", {"num_labels": 1})


def texts(count, seed=0):
    r = random.Random(seed)
    return [" ".join(r.choices(WORDS, k=r.randrange(1, 14))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A WordPiece tokenizer of the letters, in a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=40).save_pretrained(folder)
    return folder


def saved(folder, name, config, changes, dtype=torch.float32):
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **changes}, initializer_range=0.3)
    getattr(transformers, name)(made).to(dtype).save_pretrained(folder)
    return str(folder)


def embedder(folder, model=BERT, pooling="mean", after=(), dtype=torch.float32, **options):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(saved(folder, *model, dtype))
    transformer.model.to(dtype)
    pooled = Pooling(SIZES["hidden_size"], pooling_mode=pooling)
    prompts = {"query": "sea of ", "document": "", "other": "it "}
    return sentence_transformers.SentenceTransformer(
        modules=[transformer, pooled, *after], device="cpu", prompts=prompts, **options
    ).eval()


def last(handle):
    return handle.explain().rsplit("from strings: ", 1)[1]


def same(ours, theirs, rtol=1e-4, atol=2e-5):
    """Type, dtype, shape and values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for x, y in zip(ours, theirs, strict=True):
            same(x, y, rtol, atol)
        return
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=rtol, atol=atol)


def check(model, inputs, method="encode", tolerance=(1e-4, 2e-5), **options):
    """An optimised model against itself as it was, before and after."""
    stock = getattr(model, method)(inputs, **options)
    with saccade.optimize(model) as handle:
        ours = getattr(model, method)(inputs, **options)
        assert " batches" in last(handle), last(handle)
    same(ours, stock, *tolerance)
    assert "encode" not in vars(model)


OPTIONS = {
    "defaults": {},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "normalized": {"normalize_embeddings": True},
    "truncated": {"truncate_dim": 8},
    "truncated and normalized": {"truncate_dim": 8, "normalize_embeddings": True, "convert_to_tensor": True},
    "prompt": {"prompt": "dogs of "},
    "prompt by name": {"prompt_name": "other"},
    "empty prompt": {"prompt": ""},
    "batches of 3": {"batch_size": 3},
    "batches of any size": {"batch_size": sys.maxsize},
    "device": {"device": "cpu"},
    "bar": {"show_progress_bar": True},
}
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


@pytest.fixture(scope="module")
def bert(tokenizer_folder):
    return embedder(tokenizer_folder)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(bert, name):
    check(bert, texts(40) + ODD, **OPTIONS[name])


@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
def test_queries_and_documents(bert, method):
    check(bert, texts(10), method=method)


@pytest.mark.parametrize("to", [{}, {"convert_to_tensor": True}, {"convert_to_numpy": False}], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(bert, precision, to):
    """Quantised values lie at most one apart, where rounding falls on the other side."""
    check(bert, texts(150), precision=precision, tolerance=(0, 1) if "int8" in precision else (1e-4, 2e-5), **to)


@pytest.mark.parametrize("inputs", ["it is a cat", "", np.array(["a cat", "the sea"]), ("a", "bc"), [], ["a"]], ids=repr)
@pytest.mark.parametrize("to", [{}, {"convert_to_tensor": True}, {"convert_to_numpy": False}], ids=str)
def test_kinds_of_inputs(bert, inputs, to):
    check(bert, inputs, **to)


@pytest.mark.parametrize("pooling", ["cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean", ("cls", "mean")], ids=str)
def test_poolings(tokenizer_folder, pooling):
    check(embedder(tokenizer_folder, pooling=pooling), texts(20) + ODD)


@pytest.mark.parametrize("model", [QWEN, ROBERTA], ids=["qwen3", "xlm-roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_models_and_sides(tokenizer_folder, model, side):
    found = embedder(tokenizer_folder, model, "lasttoken")
    found.tokenizer.padding_side = side
    check(found, texts(20) + [x for x in ODD if "[PAD]" not in x])


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_lengths_of_queries_and_documents(tokenizer_folder, method):
    model = embedder(tokenizer_folder)
    model[0].query_length, model[0].document_length = 6, 9
    check(model, texts(20) + ODD, method=method)


def test_a_text_that_names_the_padding_token(tokenizer_folder):
    """Positions that are counted pass by it."""
    check(embedder(tokenizer_folder, ROBERTA), ["a [PAD] b", "[PAD]", "it [PAD] [PAD] is"], batch_size=1)


def test_modules_behind_the_pooling(tokenizer_folder):
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    model = embedder(tokenizer_folder, after=(Dense(SIZES["hidden_size"], 12), Normalize()))
    check(model, texts(20))
    model[2].module_output_name = "other"
    with saccade.optimize(model) as handle:
        model.encode(texts(3))
        assert last(handle) == "stock: Dense may read more than the embedding"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(tokenizer_folder, dtype):
    model = embedder(tokenizer_folder, dtype=dtype)
    tolerance = (0.1, 0.1) if dtype == torch.bfloat16 else (1e-9, 1e-9)
    for to in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}):
        check(model, texts(20), tolerance=tolerance, **to)


def test_the_user_changes_his_tokenizer(tokenizer_folder):
    """Each change is seen by the next call, and the user's tokenizer keeps its own state."""
    ours = embedder(tokenizer_folder)
    theirs = copy.deepcopy(ours)
    some = [*texts(12), *ODD, "newword sea", "A B"]

    def lowercase(model):
        normalizer = model.tokenizer.backend_tokenizer.normalizer
        normalizer.lowercase = not normalizer.lowercase

    changes = [
        lambda m: setattr(m, "max_seq_length", 7),
        lambda m: m.tokenizer.add_tokens(["newword"]),
        lambda m: m[0].model.resize_token_embeddings(len(m.tokenizer), mean_resizing=False),
        lambda m: setattr(m.tokenizer, "truncation_side", "left"),
        lowercase,
        lambda m: m.prompts.update(query="cat cat cat "),
        lambda m: setattr(m, "default_prompt_name", "query"),
        lambda m: setattr(m[1], "pooling_mode", "cls"),
        lambda m: setattr(m, "truncate_dim", 5),
    ]
    with saccade.optimize(ours) as handle:
        same(ours.encode(some), theirs.encode(some))
        for i, change in enumerate(changes):
            for model in (ours, theirs):
                torch.manual_seed(1)
                change(model)
            if i != 1:  # a token beyond the embeddings
                before = ours.tokenizer.backend_tokenizer.truncation, ours.tokenizer.backend_tokenizer.padding
                same(ours.encode(some), theirs.encode(some))
                assert " batches" in last(handle)
                assert (ours.tokenizer.backend_tokenizer.truncation, ours.tokenizer.backend_tokenizer.padding) == before


def test_a_tokenizer_without_special_tokens(tokenizer_folder):
    model = embedder(tokenizer_folder)
    model.tokenizer.backend_tokenizer.post_processor = None
    check(model, [*texts(10), "", "a", "  "])
    model.tokenizer.backend_tokenizer.enable_padding(length=30)
    model.tokenizer.backend_tokenizer.enable_truncation(3)
    check(model, [*texts(10), "a"])


def test_special_tokens_that_are_text(tokenizer_folder):
    """transformers tells the Rust tokenizer at each call, and a copy of that forgets it."""
    model, some = embedder(tokenizer_folder), ["a [SEP] b", "[CLS]", "it"]
    as_tokens = model.encode(some)
    model.tokenizer.split_special_tokens = True
    check(model, some)
    assert np.abs(model.encode(some[:2]) - as_tokens[:2]).max() > 0.01


class Letters:
    """Parts of a Rust tokenizer that are written in Python, as RoFormer's is."""

    def pre_tokenize(self, text):
        text.split(lambda i, word: [word[j : j + 1] for j in range(len(str(word)))])

    def normalize(self, text):
        text.lowercase()

    def decode_chain(self, pieces):
        return pieces


@pytest.mark.parametrize("part", ["PreTokenizer", "Normalizer", "Decoder"])
def test_a_tokenizer_that_cannot_be_copied_is_stock(tokenizer_folder, part):
    model = embedder(tokenizer_folder)
    name = {"PreTokenizer": "pre_tokenizer"}.get(part, part.lower())
    made = getattr(getattr(tokenizers, f"{name}s"), part).custom(Letters())
    setattr(model.tokenizer.backend_tokenizer, name, made)
    stock = model.encode(texts(4))
    with saccade.optimize(model) as handle:
        same(model.encode(texts(4)), stock)
        assert last(handle).startswith("stock: its tokenizer cannot be copied (")


def test_ids_in_place_of_texts(bert):
    some = texts(9)
    ids = bert.tokenizer(some)["input_ids"]
    stock = bert.encode(some)
    with saccade.optimize(bert) as handle:
        for given in (
            {"inputs": ids},
            {"input_ids": ids},
            {"input_ids": [np.array(x) for x in ids]},
            {"input_ids": [*map(tuple, ids)]},
        ):
            same(bert.encode(**given), stock)
        same(bert.encode_query(input_ids=ids, prompt=""), stock)
        same(bert.encode(input_ids=ids[3], convert_to_tensor=True), torch.as_tensor(stock[3]))
        with pytest.raises(InvalidArgument, match=r"input_ids\[1\] has 50 tokens; the model takes at most 40"):
            bert.encode(input_ids=[[2, 3], [2] * 50])
        with pytest.raises(InvalidArgument, match="goes from 5 to 999"):
            bert.encode(input_ids=[[5, 999]])
        with pytest.raises(InvalidArgument, match="with the prompt 'it '"):
            bert.encode(input_ids=ids, prompt_name="other")
        with pytest.raises(InvalidArgument, match="output_value"):
            bert.encode(input_ids=ids, output_value="token_embeddings")
        assert "output_value" in last(handle)


BAD_IDS = {
    "numbers with fractions": [[2, 3], [5.5]],
    "truths": [[2], [True]],
    "texts": [[2], ["a"]],
    "one of a text": [[2], 3],
    "lists of lists": [[2], [[5]]],
}


@pytest.mark.parametrize("ids", [5, torch.tensor(5), {2: 3}, {2, 3}, b"ab", "ab"], ids=str)
def test_what_is_no_list(bert, ids):
    """A dict would be read as its keys, and bytes as their numbers."""
    with (
        saccade.optimize(bert),
        pytest.raises(InvalidArgument, match=r"input_ids is .*; it must be a list of ints, or a list of"),
    ):
        bert.encode(input_ids=ids)


def test_ids_as_tensors_and_arrays(bert):
    with saccade.optimize(bert):
        expected = bert.encode(input_ids=[[2, 5, 3], [2, 6, 3]])
        for ids in (torch.tensor([[2, 5, 3], [2, 6, 3]]), np.array([[2, 5, 3], [2, 6, 3]], np.int32), ((2, 5, 3), [2, 6, 3])):
            same(bert.encode(input_ids=ids), expected)
        same(bert.encode(input_ids=[torch.tensor([2, 5, 3]), np.array([2, 6, 3])]), expected)
        for one in (torch.tensor([2, 5, 3]), (2, 5, 3), [np.int64(2), 5, 3]):
            same(bert.encode(input_ids=one), expected[0])


@pytest.mark.parametrize("method", ["encode", "encode_query"])
@pytest.mark.parametrize(
    "given", [((["a"],), {}), ((), {"inputs": ["a"]}), ((), {"sentences": ["a"]})], ids=["first", "inputs", "sentences"]
)
def test_texts_beside_ids_are_refused(bert, method, given):
    args, named = given
    with saccade.optimize(bert), pytest.raises(InvalidArgument, match="inputs and input_ids are both given"):
        getattr(bert, method)(*args, input_ids=[[5, 6]], **named)


def test_no_bar_is_made_where_none_is_shown(bert, monkeypatch):
    made = []
    monkeypatch.setattr("tqdm.autonotebook.tqdm", lambda *args, **options: made.append(options) or tqdm.tqdm(*args, **options))
    with saccade.optimize(bert):
        bert.encode(texts(3))
        bert.encode(texts(3), show_progress_bar=False)
        assert made == []
        bert.encode(texts(3), show_progress_bar=True)
    assert made == [{"total": 3, "desc": "Inputs"}]


@pytest.mark.parametrize("name", BAD_IDS)
def test_what_is_no_list_of_ids(bert, name):
    with saccade.optimize(bert), pytest.raises(InvalidArgument, match=r"input_ids\[1\] is .*; it must be a list of ints"):
        bert.encode(input_ids=BAD_IDS[name])


def test_tensors_in_place_of_texts_are_refused_as_in_stock(bert):
    """Asking whether one is empty raises, so that models of images would refuse theirs."""
    with saccade.optimize(bert), pytest.raises(ValueError, match="not supported by this SentenceTransformer"):
        bert.encode([torch.ones(2)])


def _tokenizer_in_python(model):
    model[0].processor = transformers.ByT5Tokenizer(model_max_length=40)
    model[0].model.resize_token_embeddings(400, mean_resizing=False)


STOCK = {
    "tokenizer in Python": ({}, _tokenizer_in_python),
    "token embeddings": ({"output_value": "token_embeddings"}, None),
    "everything": ({"output_value": None}, None),
    "processing_kwargs": ({"processing_kwargs": {"text": {"max_length": 5}}}, None),
    "hook": ({}, lambda m: m.register_forward_hook(lambda *x: None)),
    "hook of the encoder": ({}, lambda m: m[0].model.encoder.register_forward_hook(lambda *x: None)),
    "left": ({}, lambda m: setattr(m.tokenizer, "padding_side", "left")),
    "no mask": ({}, lambda m: setattr(m.tokenizer, "model_input_names", ["input_ids"])),
    "prompt left out": ({"prompt": "it "}, lambda m: setattr(m[1], "include_prompt", False)),
    "preprocess": ({}, lambda m: setattr(m, "preprocess", m.preprocess)),
}


@pytest.mark.parametrize("name", STOCK)
def test_what_is_not_covered_is_stock(tokenizer_folder, name):
    options, change = STOCK[name]
    model = embedder(tokenizer_folder)
    if change is not None:
        change(model)
    some = texts(4)  # stock 6.0 gives no more than four with output_value=None
    stock = model.encode(some, **options)
    with saccade.optimize(model) as handle:
        ours = model.encode(some, **options)
        assert last(handle).startswith("stock: ")
    if isinstance(stock, list) and isinstance(stock[0], dict):
        ours, stock = ([x["sentence_embedding"] for x in y] for y in (ours, stock))
    if name != "token embeddings":
        same(ours, stock)


def test_a_counter_of_flops_sees_what_stock_computes(bert):
    counts = []
    for optimised in (False, True):
        handle = saccade.optimize(bert) if optimised else None
        with FlopCounterMode(display=False) as counter:
            bert.encode(texts(5))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert "TorchDispatchMode" in last(handle)
    handle.restore()


def test_errors_are_those_of_stock(bert):
    with saccade.optimize(bert):
        with pytest.raises(ValueError, match="batch_size"):
            bert.encode(["a"], batch_size=0)
        with pytest.raises(ValueError, match="not found"):
            bert.encode(["a"], prompt_name="none")
        with pytest.raises(ValueError, match="not supported"):
            bert.encode(["a"], precision="int4")
        with pytest.raises(ValueError, match="additional keyword"):
            bert.encode(["a"], nonsense=1)
        with pytest.raises(TypeError):
            bert.encode()


def test_a_batch_size_bounds_the_tokens(bert, monkeypatch):
    from saccade.encoders import pipeline

    seen = []
    real = pipeline.embed
    monkeypatch.setattr(pipeline, "embed", lambda served, pool, batch: seen.append(batch) or real(served, pool, batch))
    with saccade.optimize(bert):
        bert.encode(texts(600), batch_size=4)
        assert all(x.tokens <= 4 * x.longest for x in seen)
        assert sum(len(x.ends) - 1 for x in seen) == 600
        assert len(seen) <= 155
        seen.clear()
        bert.encode(texts(2000))
        assert all(x.tokens <= pipeline.CPU_TOKENS for x in seen)
        assert len(seen) < 20


def test_signature_copy_pickle_and_restore(bert):
    before = set(vars(bert))
    handle = saccade.optimize(bert)
    stock = inspect.signature(type(bert).encode)
    ours = inspect.signature(bert.encode)
    assert list(ours.parameters) == list(stock.parameters)[1:]
    assert ours.parameters["batch_size"].default is None
    assert bert.encode.__doc__ == type(bert).encode.__doc__
    for copied in (copy.deepcopy(bert), pickle.loads(pickle.dumps(bert))):
        assert copied.encode.__func__ is type(bert).encode
        assert copied.encode.__self__ is copied
        assert copied.encode_query.__self__ is copied
    handle.restore()
    assert set(vars(bert)) == before


@pytest.mark.parametrize("another", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_an_optimised_model_is_optimised_too(tokenizer_folder, another):
    """The copy has the methods of its class as attributes."""
    model, some = embedder(tokenizer_folder), texts(12)
    before, of_pooling, stock = set(vars(model)), set(vars(model[1])), model.encode(some)
    with saccade.optimize(model):
        copied = another(model)
    with saccade.optimize(copied) as handle:
        same(copied.encode(some), stock)
        assert last(handle) == "12 inputs in 1 batches"
        assert handle.served[0].sentences is copied
        replica = copied._replicate_for_data_parallel()
        assert replica.encode.__self__ is replica
    assert set(vars(copied)) == before
    assert set(vars(copied[1])) == of_pooling


def threads():
    return [x for x in threading.enumerate() if x.name.startswith("saccade-tokens")]


def test_an_error_in_the_thread_reaches_the_caller(bert):
    some = texts(5000)
    with saccade.optimize(bert):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            bert.encode([*some, "\ud800"])
        assert not threads()
        same(bert.encode(some[:300]), bert.encode(some[:300], batch_size=8))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_caller_leaves_no_thread(bert, monkeypatch, error):
    from saccade.encoders import pipeline

    def fails(*args):
        raise error

    monkeypatch.setattr(pipeline, "embed", fails)
    with saccade.optimize(bert):
        with pytest.raises(error):
            bert.encode(texts(5000))
        assert not threads()


def test_one_thread_at_a_time_reads_the_state(bert, monkeypatch):
    """Another one may run under another autocast."""
    with saccade.optimize(bert) as handle:
        (served,) = handle.served
        read, alone = served.state.read, []
        monkeypatch.setattr(served.state, "read", lambda: alone.append(served.lock._is_owned()) or read())
        bert.encode(texts(3))
    assert alone
    assert all(alone)


def test_two_encoders_at_once(tokenizer_folder, bert):
    other = embedder(tokenizer_folder, QWEN, "lasttoken")
    some = texts(700)
    expected = [m.encode(some) for m in (bert, other)]
    found = {}
    with saccade.optimize(bert), saccade.optimize(other):

        def run(i, model):
            found[i] = model.encode(some)

        workers = [threading.Thread(target=run, args=(i, (bert, other)[i % 2])) for i in range(4)]
        for x in workers:
            x.start()
        for x in workers:
            x.join()
    for i in range(4):
        same(found[i], expected[i % 2])


def encoding_child(model, count):
    """(a forked process that is to be started, the queue into which it puts embeddings)."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child():
        torch.set_num_threads(1)
        queue.put(model.encode(texts(count)))

    return context.Process(target=child), queue


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_use(bert):
    with saccade.optimize(bert):
        expected = bert.encode(texts(300))
        process, queue = encoding_child(bert, 300)
        process.start()
        found = queue.get(timeout=60)
        process.join(10)
        assert process.exitcode == 0
    same(found, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_while_another_thread_is_inside(bert):
    """The thread holds the encoder's lock. A child that found it held would wait for ever.

    The thread outlives the fork. MKL locks its allocator when a thread ends, and a child that a fork makes then waits for ever without
    saccade too: 19 of 300 such children of torch alone did.
    """
    with saccade.optimize(bert) as handle:
        expected, (one,) = bert.encode(texts(8)), handle.served
        inside, goes_on, forked, run_packed = threading.Event(), threading.Event(), threading.Event(), one.run_packed

        def slow(*args):
            if threading.current_thread() is thread:
                inside.set()
                goes_on.wait(60)
            return run_packed(*args)

        def encode():
            bert.encode(texts(8))
            forked.wait(60)

        one.run_packed = slow
        thread = threading.Thread(target=encode)
        thread.start()
        assert inside.wait(60)
        process, queue = encoding_child(bert, 8)
        threading.Timer(0.3, goes_on.set).start()
        process.start()
        forked.set()
        try:
            assert goes_on.is_set()  # the fork has waited
            found = queue.get(timeout=30)
        finally:
            process.kill()
            process.join(10)
            thread.join(60)
    same(found, expected)


PAIRS = [
    *zip(texts(30), texts(30, 1), strict=True),
    ("", "a"),
    ("a", ""),
    ("x " * 100, "it is"),
    ("it", "y " * 60),
    ("日本語", "🙂"),
]


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 4}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"prompt": "it "},
     {"activation_fn": torch.nn.Tanh()}],
    ids=str,
)  # fmt: skip
def test_predict(tokenizer_folder, labels, options):
    saved(tokenizer_folder, *CLASSIFIER[:2], {"num_labels": labels})
    model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
    for inputs in (PAIRS, [list(x) for x in PAIRS], PAIRS[0], []):
        check(model, inputs, method="predict", **options)


def test_an_old_name_of_an_argument_has_its_effect(tokenizer_folder):
    saved(tokenizer_folder, *CLASSIFIER[:2], {"num_labels": 3})
    model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
    stock = model.predict(PAIRS, activation_fct=torch.nn.Tanh())
    with saccade.optimize(model) as handle:
        same(model.predict(PAIRS, activation_fct=torch.nn.Tanh()), stock)
        assert last(handle) == "stock: activation_fct is given"


def test_padding_on_the_left_that_a_head_reads_is_stock(tokenizer_folder):
    saved(tokenizer_folder, "XLMRobertaForSequenceClassification", *ROBERTA[1:])
    model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
    model.tokenizer.padding_side = "left"
    stock = model.predict(PAIRS)
    with saccade.optimize(model) as handle:
        same(model.predict(PAIRS), stock)
        assert last(handle) == "stock: padding on the left is read by its head"


def test_predict_with_softmax(tokenizer_folder):
    for labels in (1, 3):
        saved(tokenizer_folder, *CLASSIFIER[:2], {"num_labels": labels})
        model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
        stock = model.predict(PAIRS, apply_softmax=True)
        with saccade.optimize(model) as handle:
            same(model.predict(PAIRS, apply_softmax=True), stock)
            assert last(handle).startswith("stock: versions") == (labels == 1)


def test_rank(tokenizer_folder):
    saved(tokenizer_folder, *CLASSIFIER)
    model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
    stock = model.rank("it is", texts(20), top_k=5)
    with saccade.optimize(model) as handle:
        ours = model.rank("it is", texts(20), top_k=5)
        assert " batches" in last(handle)
    assert [x["corpus_id"] for x in ours] == [x["corpus_id"] for x in stock]


@pytest.mark.parametrize("limit", [1, 2, 3, None, 1e30])
def test_limits(tokenizer_folder, limit):
    """A limit that leaves no room for a text, one that stock refuses, and none."""
    model = embedder(tokenizer_folder)
    model.max_seq_length = limit
    found = []
    for optimised in (False, True):
        handle = saccade.optimize(model) if optimised else None
        try:
            found.append(model.encode(texts(5)))
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            found.append(type(error))
        if handle is not None:
            handle.restore()
    ours, stock = found[1], found[0]
    if isinstance(stock, type):
        assert ours is stock
    else:
        same(ours, stock)


def test_an_interrupt_leaves_no_thread(bert, monkeypatch):
    import signal

    from saccade.encoders import pipeline

    real, calls = pipeline.embed, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(pipeline, "embed", interrupted)
    # a process that a shell starts in the background ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with saccade.optimize(bert):
        try:
            with pytest.raises(KeyboardInterrupt):
                bert.encode(texts(5000))
        finally:
            signal.signal(signal.SIGINT, before)
        assert not threads()
        assert bert.encode(["a"]).shape == (1, SIZES["hidden_size"])


@pytest.mark.slow  # a process imports torch
def test_a_pool_of_processes(bert):
    """Its processes get the model without what is ours, and stock's batches."""
    some = texts(40) + ODD
    stock = bert.encode(some)
    with saccade.optimize(bert) as handle:
        pool = bert.start_multi_process_pool(["cpu"])
        try:
            for method, inputs in (("encode", some), ("encode_document", [])):
                same(getattr(bert, method)(inputs, pool=pool), stock[: len(inputs)] if inputs else np.array([]))
                assert last(handle) == "stock: a pool of processes computes it"
        finally:
            bert.stop_multi_process_pool(pool)
