"""The problems every backend of `nm_sparse_attention` must pass: patterns, features, awkward lengths, head dims and group
sizes."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.testing.cases import Case


@dataclass(frozen=True)
class NMSparseCase(Case):
    """One named problem, without its data. blocks: a block mask in which some queries see no tile. keys_hidden: a mask
    hides the last keys, which hold NaN, from every query. dense_first, dense_recent: keys that are never pruned."""

    pattern: str = "2:4"
    blocks: bool = False
    keys_hidden: int = 0
    dense_first: int = 0
    dense_recent: int = 0


_SIZES = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": 37, "kv_len": 50, "head_dim": 16, "lse_grad": True}


def _case(name: str, *tags: str, **different) -> NMSparseCase:
    return NMSparseCase(name, **{**_SIZES, **different}, tags=frozenset(tags))


def _patterns() -> list[NMSparseCase]:
    patterns = ("2:4", "1:2", "1:4", "3:4", "2:8", "4:8", "1:16", "15:16", "2:3", "3:5", "5:12")
    cases = [
        _case(f"pattern-{p.replace(':', '-')}", *(("quick",) if p in ("2:4", "1:2", "3:5") else ()), pattern=p) for p in patterns
    ]
    cases += [_case(f"causal-{p.replace(':', '-')}", "quick", pattern=p, is_causal=True, q_len=50) for p in ("2:4", "1:2", "2:3")]
    return cases


def _features() -> list[NMSparseCase]:
    full, shared = (2, 2, 37, 50), (1, 1, 37, 50)
    return [
        _case("no-lse-grad", lse_grad=False),
        _case("causal-fewer-keys", is_causal=True, kv_len=21),
        _case("mask-full", "quick", mask="bool", mask_shape=full),
        _case("mask-keys", mask="bool", mask_shape=(2, 1, 1, 50)),
        _case("mask-heads", mask="bool", mask_shape=(1, 2, 1, 50)),
        _case(
            "mask-queries-blocks-dropout", mask="bool", mask_shape=(130, 200), blocks=True, dropout_p=0.2, q_len=130, kv_len=200
        ),
        _case("mask-grouped", "quick", mask="bool", mask_shape=(2, 4, 70, 130), heads=4, q_len=70, kv_len=130, pattern="1:2"),
        _case("bias-full", "quick", bias=full),
        _case("bias-shared", bias=shared),
        _case("bias-keys", bias=(2, 1, 1, 50)),
        _case("bias-queries", bias=(1, 2, 37, 1)),
        _case("bias-rank2", bias=(37, 50), pattern="3:5"),
        _case("dropout", "quick", dropout_p=0.3),
        _case("dropout-odd-group", dropout_p=0.3, pattern="2:3", is_causal=True),
        _case("grouped", "quick", heads=4),
        _case("grouped-everything", heads=4, is_causal=True, dropout_p=0.2, blocks=True, q_len=130, kv_len=140),
        _case("blocks", "quick", blocks=True, q_len=130, kv_len=200),
        _case("blocks-mask-odd-group", blocks=True, mask="bool", q_len=70, kv_len=130, pattern="2:3"),
        _case("hidden-nan", "quick", keys_hidden=7),
        _case("lengths", "quick", batch=3, lengths=True),
        _case("lengths-causal", "quick", batch=3, lengths=True, is_causal=True, q_len=70, kv_len=70),
        _case("lengths-causal-odd-group", batch=3, lengths=True, is_causal=True, pattern="2:3", dropout_p=0.2),
        _case("lengths-mask-blocks", batch=3, lengths=True, mask="bool", blocks=True, q_len=130, kv_len=140),
        _case("lengths-bias", batch=3, lengths=True, bias=(1, 2, 37, 50), pattern="1:2"),
    ]


def _dense_keys() -> list[NMSparseCase]:
    both = {"dense_first": 4, "dense_recent": 8}
    return [
        _case("dense-first", "quick", dense_first=4),
        _case("dense-recent", "quick", dense_recent=8),
        _case("dense-causal", "quick", is_causal=True, q_len=50, **both),
        _case("dense-odd-group", "quick", pattern="2:3", dense_first=3, dense_recent=6, dropout_p=0.3),
        _case("dense-1-16", pattern="1:16", dense_first=16, dense_recent=16, is_causal=True, q_len=70, kv_len=70),
        _case("dense-more-than-all", dense_first=64, dense_recent=400),
        _case("dense-fewer-queries", q_len=5, **both),
        _case("dense-mask", mask="bool", mask_shape=(2, 2, 37, 50), **both),
        _case("dense-bias", bias=(2, 2, 37, 50), pattern="1:2", **both),
        _case("dense-hidden-nan", keys_hidden=7, dense_first=48, dense_recent=8),
        _case("dense-lengths", batch=3, lengths=True, is_causal=True, **both),
        _case("dense-everything", heads=4, is_causal=True, dropout_p=0.2, blocks=True, q_len=130, kv_len=140, **both),
    ]


def _sizes() -> list[NMSparseCase]:
    pairs = ((1, 1), (1, 3), (3, 1), (5, 4), (16, 16), (17, 33), (1, 65), (64, 64), (65, 63))
    cases = [_case(f"length-{q}x{k}", batch=1, q_len=q, kv_len=k) for q, k in pairs]
    cases += [_case(f"dim-{d}", batch=1, q_len=21, kv_len=30, head_dim=d) for d in (1, 24, 64, 80, 128)]
    cases.append(_case("dim-256", "large", batch=1, q_len=40, kv_len=40, head_dim=256))
    return cases


NM_SPARSE: tuple[NMSparseCase, ...] = (*_patterns(), *_features(), *_dense_keys(), *_sizes())
