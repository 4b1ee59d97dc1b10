"""The problems that every backend of `attention` must pass: sizes around powers of two, each feature, and features combined.

They are small because under Triton's interpreter a 64 x 64 x 64 tile costs about 5 ms.
"""

from __future__ import annotations

from saccade.testing.cases import Case


def _case(name: str, sizes: tuple[int, int, int, int, int, int], *tags: str, **features) -> Case:
    labels = set(tags) | ({"pooling"} if sizes[3] == 1 else set())
    return Case(name, *sizes, tags=frozenset(labels), **features)


def _lengths_of_sequence() -> list[Case]:
    """Every awkward number of queries and of keys, causal or not, in as few programs as possible."""
    hard = (1, 17, 31, 63, 65, 127, 128)
    cases = [_case(f"square-{t}", (1, 2, 2, t, t, 32), *(("quick",) if t in (1, 17, 65) else ())) for t in hard]
    pairs = ((1, 17), (1, 128), (17, 1), (63, 1), (31, 127), (127, 31), (65, 17), (17, 65), (128, 63))
    cases += [_case(f"cross-{q}x{k}", (1, 2, 2, q, k, 32)) for q, k in pairs]
    cases += [
        _case(f"causal-{q}x{k}", (1, 2, 2, q, k, 32), is_causal=True)
        for q, k in ((31, 31), (17, 65), (65, 17), (1, 31), (128, 128))
    ]
    cases += [_case(f"beyond-{q}x{k}", (1, 1, 1, q, k, 32), "fallback") for q, k in ((129, 129), (1, 129), (129, 17))]
    return cases


def _head_dims() -> list[Case]:
    cases = []
    for dim in (16, 24, 32, 64, 80, 96, 128, 256):
        tags = ("quick",) if dim in (24, 80) else ("large",) if dim == 256 else ()
        cases.append(_case(f"dim-{dim}", (1, 2, 2, 33, 40, dim), *tags))
        cases.append(_case(f"pool-dim-{dim}", (2, 2, 2, 1, 40, dim), *tags))
    cases.append(_case("dim-1", (1, 2, 2, 9, 12, 1)))
    # the chunked kernels: long rows with a wide head, plain and with every feature that they support
    cases.append(_case("wide-128", (1, 2, 2, 127, 100, 128), "large"))
    cases.append(_case("wide-grouped-causal-dropout", (1, 2, 1, 70, 100, 144), "large", is_causal=True, dropout_p=0.2))
    cases.append(_case("wide-mask-lengths", (2, 1, 1, 65, 70, 160), "large", mask="bool", lengths=True))
    # tiles of 16 keys, whose joined draws of dropout Triton misplaces beside a mask
    cases.append(_case("wide-mask-dropout", (1, 2, 2, 64, 70, 160), "large", mask="bool", dropout_p=0.17))
    cases.append(
        _case("wide-shared-mask-dropout", (1, 2, 1, 40, 33, 256), "large", mask="bool", mask_shape=(40, 33), dropout_p=0.17)
    )
    cases.append(_case("narrow-mask-dropout", (2, 2, 2, 33, 16, 32), mask="bool", dropout_p=0.17))
    cases.append(_case("narrow-mask-dropout-64", (2, 2, 2, 16, 12, 64), mask="bool", mask_shape=(2, 1, 1, 12), dropout_p=0.17))
    cases.append(_case("wide-bias", (1, 2, 2, 70, 65, 128), "large", bias=(1, 2, 70, 65), lse_grad=True))
    return cases


# (suffix, features) that hold for any Tq and Tk, given B = 2, H = 4
def _features(q: int, k: int) -> list[tuple[str, dict]]:
    full, by_batch, by_head, shared = (2, 4, q, k), (2, 1, q, k), (1, 4, q, k), (1, 1, q, k)
    features: list[tuple[str, dict]] = [
        ("causal", {"is_causal": True}),
        ("lengths", {"lengths": True}),
        ("causal-lengths", {"is_causal": True, "lengths": True}),
        ("lse-grad", {"lse_grad": True}),
        ("dropout", {"dropout_p": 0.3}),
        ("dropout-causal-lse", {"dropout_p": 0.3, "is_causal": True, "lse_grad": True}),
    ]
    shapes = {
        "full": full,
        "batch": by_batch,
        "head": by_head,
        "shared": shared,
        "rank2": (q, k),
        "keys": (2, 1, 1, k),
        "queries": (1, 4, q, 1),
    }
    features += [(f"mask-{n}", {"mask": "bool", "mask_shape": s, "lse_grad": n == "full"}) for n, s in shapes.items()]
    features += [(f"bias-{n}", {"bias": s, "lse_grad": n == "head"}) for n, s in shapes.items()]
    features += [
        ("mask-lengths-dropout", {"mask": "bool", "lengths": True, "dropout_p": 0.25}),
        ("bias-lengths-dropout", {"bias": by_head, "lengths": True, "dropout_p": 0.25}),
    ]
    return features


_QUICK = {"lengths", "mask-full", "bias-head", "bias-keys", "dropout-causal-lse"}


def _with_features(prefix: str, q: int, k: int, dim: int) -> list[Case]:
    cases = []
    for suffix, features in _features(q, k):
        tags = ("quick",) if suffix in _QUICK else ()
        cases.append(_case(f"{prefix}-{suffix}", (2, 4, 4, q, k, dim), *tags, **features))
    for suffix, features in (
        ("plain", {}),
        ("causal", {"is_causal": True}),
        ("mask", {"mask": "bool"}),
        ("lengths", {"lengths": True}),
        ("dropout", {"dropout_p": 0.3}),
        ("bias", {"bias": (1, 4, q, k)}),
        ("bias-batch", {"bias": (2, 1, q, k), "lse_grad": True}),
    ):
        tags = ("quick",) if suffix in ("plain", "bias") else ()
        cases.append(_case(f"{prefix}-grouped-{suffix}", (2, 4, 2, q, k, dim), *tags, **features))
    return cases


def _windows() -> list[Case]:
    """Two images of three windows with a bias for each window, of every shape that a bias may have."""
    tiles, single = (6, 4, 4, 13, 21, 16), (6, 2, 2, 1, 21, 24)
    return [
        _case("windows", tiles, bias=(3, 4, 13, 21), windows=3, lse_grad=True),
        _case("windows-heads-alike", tiles, "quick", bias=(3, 1, 13, 21), windows=3),
        _case("windows-keys", tiles, bias=(3, 4, 1, 21), windows=3, dropout_p=0.25),
        _case("windows-queries", tiles, bias=(3, 4, 13, 1), windows=3),
        _case("windows-grouped", (6, 4, 2, 13, 21, 16), bias=(3, 4, 13, 21), windows=3),
        _case("windows-one-image", (3, 4, 4, 13, 21, 16), bias=(3, 4, 13, 21), windows=3),
        _case("windows-one-query", single, bias=(3, 2, 1, 21), windows=3, lse_grad=True),
        _case("windows-wide", (4, 1, 1, 65, 70, 160), "large", bias=(2, 1, 65, 70), windows=2),
    ]


def _sliding() -> list[Case]:
    """Sliding windows, also with only the query's own key, and with more queries than keys."""
    return [
        _case("sliding", (2, 2, 2, 150, 150, 16), "quick", window=(9, 20), lse_grad=True),
        _case("sliding-causal-grouped-dropout", (1, 4, 2, 70, 70, 24), window=(33, None), is_causal=True, dropout_p=0.2),
        _case("sliding-one-sided", (2, 2, 2, 40, 40, 80), window=(None, 3)),
        _case("sliding-diagonal", (2, 2, 2, 19, 19, 16), window=(0, 0), packed=True),
        _case("sliding-lengths", (3, 2, 2, 90, 90, 16), window=(5, 64), lengths=True, lse_grad=True),
        _case("sliding-cross", (2, 4, 2, 90, 30, 16), window=(8, 2), lse_grad=True),
    ]


def _packed() -> list[Case]:
    sizes = (2, 2, 2, 19, 19, 16)
    return [
        _case("packed-plain", sizes, "quick", packed=True),
        _case("packed-causal-dropout", sizes, packed=True, is_causal=True, dropout_p=0.1),
        _case("packed-lengths-lse", sizes, packed=True, lengths=True, lse_grad=True),
        _case("packed-bias", sizes, "quick", packed=True, bias=(1, 2, 19, 19)),
        _case("packed-mask", sizes, packed=True, mask="bool"),
        _case("packed-single", (3, 2, 2, 1, 1, 16), packed=True),
    ]


def _models() -> list[Case]:
    """The shapes of models, a few batch rows of each."""
    return [
        _case("minilm", (2, 2, 2, 128, 128, 32), "quick", lengths=True),
        _case("swin", (3, 2, 2, 49, 49, 32), "quick", bias=(1, 2, 49, 49)),
        _case("swin-shifted", (6, 2, 2, 49, 49, 32), "quick", bias=(2, 2, 49, 49), windows=2),
        _case("vit", (1, 2, 2, 65, 65, 64), "quick"),
        _case("cls-of-vit", (2, 4, 4, 1, 65, 64), "quick"),
    ]


ATTENTION: tuple[Case, ...] = (
    *_lengths_of_sequence(),
    *_head_dims(),
    *_with_features("small", 13, 21, 16),
    *_with_features("pool", 1, 21, 24),
    *_windows(),
    *_sliding(),
    *_packed(),
    *_models(),
)


def tagged(*tags: str, without: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """The cases that have all of `tags` and none of `without`."""
    return tuple(c for c in ATTENTION if set(tags) <= c.tags and not c.tags & set(without))
