"""Philox against the published vectors, and the dropout mask built from it."""

import pytest
import torch

from saccade.engine import philox as module
from saccade.engine.philox import dropout_keep, philox
from saccade.launch.dropout import drop_threshold, survival_inverse, word_threshold

ALL = 0xFFFFFFFF


def rounds(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers, written independently of the library's."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & ALL, (a >> 32) ^ c[3] ^ k[1], a & ALL]
        k = [(k[0] + 0x9E3779B9) & ALL, (k[1] + 0xBB67AE85) & ALL]
    return c


# known answers of the Random123 library, "philox4x32 10"
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_oracle_gives_the_published_words(counter, key, words):
    assert rounds(counter, key) == words


def test_published_words_at_counter_zero():
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in philox(0, zero, zero)] == KNOWN[0][2]


def test_the_library_is_the_oracle_for_any_key_and_counter():
    keys = [0, 1, 2**32, 2**62 - 1, 0x243F6A8885A308D3]
    for key in keys:
        for c0, c1 in ((0, 0), (1, 0), (0, 1), (ALL, ALL), (123456789, 987654321)):
            words = [int(w) for w in philox(key, torch.tensor([c0]), torch.tensor([c1]))]
            assert words == rounds([c0, c1, 0, 0], [key & ALL, key >> 32])


def test_dropout_keep_is_its_definition():
    seed = torch.tensor([0x1234567890ABCDEF])
    p, batch, heads, q_len, kv_len = 0.4, 2, 3, 5, 7
    keep = dropout_keep(seed, p, batch, heads, q_len, kv_len)
    key = [int(seed) & ALL, int(seed) >> 32]
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                for j in range(kv_len):
                    word = rounds([i * 2 + j // 4, b * heads + h, 0, 0], key)[j % 4]
                    assert bool(keep[b, h, i, j]) == ((word >> 8) / 2**24 >= p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_in_every_problem(p):
    keep = dropout_keep(torch.tensor([99]), p, 4, 4, 64, 64).double()
    share = keep.mean(dim=(2, 3))
    # 4096 draws: 5 standard deviations
    assert (share - (1 - p)).abs().max() < 5 * (p * (1 - p) / 4096) ** 0.5
    assert not torch.equal(keep[0, 0], keep[0, 1])
    assert not torch.equal(keep[0, 0], keep[1, 0])


@pytest.mark.parametrize("p", [0.7, 0.5, 3 * 2.0**-24])
def test_a_draw_survives_from_the_number_on_that_kernels_are_given(monkeypatch, p):
    """0.7 is rounded down to float32, so its least draw is below 0.7 itself."""
    least = drop_threshold(p)
    words = [torch.tensor([[[draw << 8]]]) for draw in (least - 1, least, least + 1, 0)]
    monkeypatch.setattr(module, "philox", lambda *given: words)
    assert dropout_keep(torch.tensor([99]), p, 1, 1, 1, 4).flatten().tolist() == [False, True, True, False]


def test_constants_are_those_of_the_paper():
    assert (module._ROUNDS, module._M0, module._M1) == (10, 0xD2511F53, 0xCD9E8D57)


def test_every_kernel_drops_by_the_same_number():
    """Draws are compared with float32(dropout_p), which above 0.5 is dropout_p rounded up or down to a multiple of 2^-24."""
    for p in (0.1, 0.3, 0.7, 0.9):
        threshold = drop_threshold(p)
        assert threshold * 2.0**-24 >= torch.tensor(p).double() > (threshold - 1) * 2.0**-24
    # rounded down: dropout_p itself would drop one word more
    assert drop_threshold(0.7) < 0.7 * 2**24


def test_whole_words_are_dropped_as_their_upper_24_bits():
    for p in (1e-12, 0.1, 0.7, 1 - 2.0**-24):
        least = word_threshold(p)
        assert least >> 8 >= drop_threshold(p) > least - 1 >> 8
        assert survival_inverse(p) == 1 / (1 - p)
    # float32 of it is 1: a word of 32 ones is left, and counts nothing
    assert (word_threshold(1 - 2.0**-40), survival_inverse(1 - 2.0**-40)) == (2**32 - 1, 0.0)
