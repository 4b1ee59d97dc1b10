"""Packed batches that go by lists of lengths: C++ launches what Python launches, for other batches of the kind too, after the lists of each."""

from __future__ import annotations

import pytest
import torch
from packed_made import named_call
from recorded_cuda import Stub, bound_of_long
from recorded_triton import number_of, recording

import saccade
from saccade import native
from saccade.engine import op_replay
from saccade.exact.long import config as long_config
from saccade.exact.long import sm90
from saccade.exact.ragged import call as ragged_call
from saccade.exact.ragged import config, plan, sm80, token_launches
from saccade.exact.ragged.config import MOST_AT_ONCE, TILES
from saccade.exact.recorded import Backward
from saccade.exact.varlen.op import OPS
from saccade.native.recording import Recorder

HEADS = 2
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are recorded on a CPU")
PLACE = number_of("place_kernel")
OPTIONS = {"plain": {}, "causal": {"is_causal": True, "scale": 0.3}, "dropout": {"dropout_p": 0.2}}


@pytest.fixture
def seen(monkeypatch):
    """Every batch goes by lists, on Triton's kernels."""
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    yield from recording(monkeypatch)


@pytest.fixture
def with_cuda(monkeypatch):
    """The same, on those of CUDA C++ where they are preferred."""
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    made = recording(monkeypatch, with_cuda=True)
    found = next(made)
    monkeypatch.setattr(sm90, "takes", lambda *given: True)
    monkeypatch.setattr(sm90, "_launch", bound_of_long(found))
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(sm80, "takes", lambda tile, args, *others: tile == 64 and args.seed is None)
    monkeypatch.setattr(sm80, "_launch", lambda *given: Stub(found, "ragged_backward", (264, 1), 128, 64))
    yield found
    next(made, None)


def batch(lengths, dim=16, keys=None, packed=False, kv_heads=HEADS):
    """Leaves, the ends of queries and of keys, and the longest of both."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ends_k = ends if keys is None else torch.tensor([0, *keys]).cumsum(0).int()
    shapes = [(int(ends[-1]) + 1, HEADS, dim)] + [(int(ends_k[-1]) + 1, kv_heads, dim)] * 2
    shapes = [(shapes[0][0], 3, HEADS, dim)] if packed else shapes
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    return leaves, ends, ends_k, max(lengths), max(keys or lengths)


def run(seen, given, **options):
    """The launches of a call and of its gradient, with names in the place of addresses."""
    (leaves, ends, ends_k, longest, longest_k), before = given, len(seen)
    torch.manual_seed(0)
    names = named_call(leaves, (ends, ends_k), (longest, longest_k), **options)
    return told(seen[before:], names | {"ends_k": ends_k})


def told(launches, names):
    known, made, lists = {x.data_ptr(): name for name, x in names.items()}, [], None

    def named(x):
        if isinstance(x, tuple | list):
            return [named(y) for y in x]
        if lists is not None:  # these first: what a launch of forward had is given back, and a gradient may lie there
            members, counts, room = lists
            size = 4 * room * (len(TILES) + 1)
            if members <= x < members + size:
                return "members", *divmod(x - members, 4 * room)
            if counts <= x < counts + 4 * (len(TILES) + 1):
                return "count", (x - counts) // 4, 0
        return known.get(x, "other" if x > 2**24 else x)

    for launch in launches:
        if launch[0] == PLACE:
            _, _, _, members, counts, _, room, *_ = launch[-1]
            lists = members, counts, room
        made.append(named(launch))
    return made


def by_python(seen, given, recorded, **options):
    """The same without C++; recorded: as Python launches for batches of any size."""
    calls, native.calls = native.calls, None
    plan._PLANS.clear()
    try:
        if not recorded:
            return run(seen, given, **options)
        with Recorder():
            return run(seen, given, **options)
    finally:
        native.calls = calls


def by_cpp(seen, given, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
        patch.setattr(Backward, "__call__", lambda *given: pytest.fail("Python makes the gradient"))
        return run(seen, given, **options)


def learn(seen, given, **options):
    """Forward and backward are described to C++: the first gradient of a call that Python made is Python's."""
    for _ in range(2):
        run(seen, given, **options)


def check(seen, first, others, monkeypatch, **options):
    """One description serves the other batches."""
    learn(seen, first, **options)
    assert len(native.calls) == 1
    for other in others:
        found = by_cpp(seen, other, monkeypatch, **options)
        assert found == by_python(seen, other, True, **options)
        assert [x[0] for x in found].count(PLACE) == 2
        # what Python launches for this batch alone, which makes its lists once: the same, but for blocks and memory that hold any batch of the kind
        plain = [x for x in by_python(seen, other, False, **options) if x[0] != PLACE]
        ours = [x for x in found if x[0] != PLACE]
        assert [x[0] for x in ours] == [x[0] for x in plain]
        for mine, theirs in zip(ours, plain, strict=True):
            assert free_of_parked(mine) == free_of_parked(theirs)
    assert len(native.calls) == 1
    return found


def free_of_parked(launch):
    """A launch without its blocks; one of backward on sm_90 also without the numbers that a block parks, the last but those that are bound."""
    function, _, *rest = launch
    if len(launch) == 6 and function in [number_of(f"backward{kind}_packed") for kind in ("", "_dropout")]:
        *rest, arguments = rest
        names = [x for x in arguments if not isinstance(x, int)]
        rest = [*rest, names, arguments[:7], arguments[11:18]]
    return function, rest


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize(
    ("lengths", "others", "buckets"),
    [
        ([140, 9, 0, 33], ([5, 250, 130, 1], [129], [200] * 9 + [16] * 90), 5),
        ([100, 9], ([5, 128, 1], [65, 0, 0]), 4),
        ([16, 9], ([5, 12, 1], [9] * 40), 1),
    ],
    ids=["long", "128", "16"],
)
def test_another_batch_of_the_kind(seen, lengths, others, buckets, packed, options, monkeypatch):
    made = [batch(x, packed=packed) for x in others]
    found = check(seen, batch(lengths, packed=packed), made, monkeypatch, **options)
    tiles = [x for x in found if x[0] == number_of("forward_tile_kernel")]
    assert len(tiles) == min(buckets, len(TILES))
    assert {x[2][7:9][0][:2] for x in tiles} == {("members", i) for i in range(min(buckets, len(TILES)))}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("lengths", "keys"), [([140, 9], [100, 12]), ([20, 3], [300, 90]), ([40, 9], [40, 4])], ids=str)
def test_other_lengths_of_keys(seen, lengths, keys, options, monkeypatch):
    """Queries may be shorter than a bucket that keys fill."""
    others = [batch([*lengths, *lengths], keys=[*keys[::-1], *keys]), batch([x - 1 for x in lengths], keys=[x - 1 for x in keys])]
    check(seen, batch(lengths, keys=keys), others, monkeypatch, **options)


def test_keys_of_another_power_of_two_are_another_kind(seen):
    """Kernels take the most queries and keys of each bucket, which follow from both."""
    for count, keys in enumerate(([100, 12], [129, 12], [60, 12]), 1):
        run(seen, batch([200, 9], keys=keys))
        assert len(native.calls) == count


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_kernels_of_sm90(with_cuda, dim, kv_heads, options, monkeypatch):
    monkeypatch.setattr(config, "timed", lambda *given: True)
    lengths, others = [140, 9, 0, 33], ([5, 250, 130, 1], [129], [200] * 9 + [16] * 90)
    options = options | {"enable_gqa": kv_heads < HEADS}
    made = [batch(x, dim, kv_heads=kv_heads) for x in others]
    found = check(with_cuda, batch(lengths, dim, kv_heads=kv_heads), made, monkeypatch, **options)
    names = {number_of(name): name for name in ("forward_packed", "backward_packed", "ragged_backward")}
    count = [names.get(x[0]) for x in found].count
    if "dropout_p" not in options:  # lists of up to 128 tokens and of more; Triton has the forward of the latter at D = 32
        assert count("forward_packed") == 2 - (dim == 32 and "is_causal" not in options)
        assert (count("backward_packed"), count("ragged_backward")) == (2, 1)


@pytest.mark.parametrize("dim", [32, 64])
def test_lengths_for_which_forward_changes(with_cuda, dim, monkeypatch):
    """At D = 32 Triton computes up to 511 tokens and CUDA C++ from 512 on, which no other batch of a kind does otherwise."""
    kinds = 0
    for longest, others in ((417, (300, 511)), (512, (512,)), (1000, (520, 1023)), (1024, (1024,))):
        learn(with_cuda, batch([longest, 30], dim))
        kinds += 1
        assert len(native.calls) == kinds
        for other in others:
            given = batch([20, other, other // 2, 1], dim)
            found = by_cpp(with_cuda, given, monkeypatch)
            assert found == by_python(with_cuda, given, True)
            triton = number_of("forward_long_kernel") in [x[0] for x in found]
            assert triton == (dim == 32 and other < 512)
    assert len(native.calls) == kinds


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("causal", [0, 1, 2])
def test_every_length_of_a_kind_has_one_forward(seen, dim, causal):
    leaves, ends, *_ = batch([9])
    kinds: dict[tuple, set] = {}
    for longest in range(1, 2100):
        call = (longest, longest, *leaves, ends, ends, 0.0, "full", None, False, False, "ragged")
        kinds.setdefault(native.calls.key(call), set()).add(config.forward_by_triton(dim, causal, longest))
    assert len(kinds) == 12
    assert all(len(found) == 1 for found in kinds.values())


@pytest.mark.parametrize("first", ["one launch", "lists"])
def test_one_launch_and_lists_are_two_kinds(seen, first, monkeypatch):
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 4 * HEADS * 16 * 140)
    batches = {"one launch": [140, 9, 130, 1], "lists": [140, 9, 130, 1, 1]}
    kernels = {name: [x[0] for x in by_python(seen, batch(lengths), True)] for name, lengths in batches.items()}
    assert [PLACE in kernels[name] for name in batches] == [False, True]
    second = next(name for name in batches if name != first)
    for count, name in enumerate((first, second), 1):
        learn(seen, batch(batches[name]))
        assert len(native.calls) == count
    for name in (first, second, first):
        given = batch(batches[name][::-1])
        assert [x[0] for x in by_cpp(seen, given, monkeypatch)] == kernels[name]
    assert len(native.calls) == 2


def test_token_tiles_and_lists_are_two_kinds(seen, monkeypatch):
    """More tokens than token tiles take go by lists, whatever their number of sequences."""
    for module in (ragged_call, token_launches):
        monkeypatch.setattr(module, "MOST_EAGER", 64 * HEADS * 16)
    monkeypatch.setattr(token_launches, "capture_id", lambda device: 0)
    monkeypatch.setattr(
        ragged_call.RaggedCall, "eager_tokens", property(lambda call: max(call.args.max_q, call.args.max_k) <= 128)
    )
    for count, lengths in enumerate(([40, 23], [40, 24]), 1):
        learn(seen, batch(lengths))
        assert len(native.calls) == count
    for lengths, by_lists in (([33, 1, 9], False), ([33, 30], False), ([33, 31], True), ([64], True), ([60] * 30, True)):
        found = [x[0] for x in by_cpp(seen, batch(lengths), monkeypatch)]
        assert (PLACE in found) == by_lists
        assert (number_of("forward_tokens_kernel") in found) != by_lists
    assert len(native.calls) == 2


def test_more_sequences_than_lists_hold_are_left_to_python(seen, monkeypatch):
    for module in (ragged_call, plan):
        monkeypatch.setattr(module, "MOST_AT_ONCE", 8)
    for lengths, known in (([20, *[3] * 8], 0), ([20, *[3] * 7], 1)):
        learn(seen, batch(lengths))
        assert len(native.calls) == known
    by_cpp(seen, batch([3, *[20] * 7]), monkeypatch)
    prepared = []
    with monkeypatch.context() as patch:
        prepare = saccade.exact.varlen.api._prepare
        patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: prepared.append(1) or prepare(*given))
        run(seen, batch([3, *[20] * 8]))
    assert prepared == [1]
    assert len(native.calls) == 1


def test_lengths_of_a_kind_that_choose_two_kernels_are_left_to_python(seen, monkeypatch):
    """As of grouped heads, whose queries together are bounded, in a number that is no power of two."""
    for limit, known in ((200, 0), (256, 1)):
        monkeypatch.setattr(ragged_call.sm90, "takes", lambda args, *others, limit=limit: args.max_q > limit)
        run(seen, batch([140, 9]))
        assert len(native.calls) == known


def test_sharing_is_bounded_inside_of_a_kind(monkeypatch):
    """Three query heads of a key head: 2,731 queries are too many and 2,730 are not."""
    monkeypatch.setattr(sm90.choice, "arch_of", lambda device: 90)
    monkeypatch.setattr(sm90.choice, "obstacles", lambda arch: ())
    monkeypatch.setattr(long_config, "MAX_TOKENS", 4096)
    query, key = torch.zeros(10, 3, 64, dtype=torch.half), torch.zeros(10, 1, 64, dtype=torch.half)
    ends = torch.tensor([0, 10], dtype=torch.int32)
    for longest, uniform in ((2000, True), (2730, False), (2731, False), (4000, False)):
        args = ragged_call.VarlenArgs(query, key, key, ends, ends, None, None, longest, longest, 0.0, 0, 1.0)
        assert ragged_call.RaggedCall(args).is_one_kind() == uniform


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_ops_of_compiled_programs(seen, dropout_p, monkeypatch):
    monkeypatch.setattr(op_replay, "may_record", lambda *given: native.calls is not None)

    def computed(given):
        (query, key, value), ends, _, longest, _ = given
        query, key, value = (x.detach() for x in (query, key, value))
        dout, seed, before = torch.zeros_like(query), torch.zeros(1, dtype=torch.int64) if dropout_p else None, len(seen)
        call = (query, key, value, ends, ends, None, seed, longest, longest, dropout_p, 0, 0.25)
        out, lse = OPS.forward_op(*call, "ragged")
        gradients = OPS.backward_op(dout, None, out, lse, *call, False, "ragged")
        names = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (query, key, value, *gradients), strict=False))
        return told(seen[before:], names | {"ends": ends, "out": out, "lse": lse, "dout": dout})

    computed(batch([140, 9, 20]))
    assert len(native.calls) == 2
    for lengths in ([5, 250, 130, 1], [129]):
        given = batch(lengths)
        with monkeypatch.context() as patch:
            patch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the call"))
            found = computed(given)
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            with Recorder():
                assert found == computed(given)
        assert [x[0] for x in found].count(PLACE) == 2


def test_lists_of_a_recorded_call_lie_where_they_lie_for_every_batch(seen):
    """So many sequences apart as one call may have; its programs are those of the most."""
    given = batch([140, *[3] * 20])
    learn(seen, given)
    seen.clear()
    run(seen, given)
    place = [x for x in seen if x[0] == PLACE]
    assert [x[1] for x in place] == [16, 16]
    assert [x[2][5:7] for x in place] == [[21, MOST_AT_ONCE]] * 2
