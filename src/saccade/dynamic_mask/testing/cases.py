"""The problems every backend of `dynamic_mask_attention` must pass: each feature, features combined, head dims and group
sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicMaskCase:
    """One named problem, without its data.

    keep: keys that each query keeps; sinks and window: how many it also keeps. lengths: real keys of each batch row, the first 0 and the last full. documents: a few
    documents in each row. ties: scores are integers. lse_grad: the log-sum-exp gets a gradient too. tags: "quick" (a
    cross-section), "large" (slow when interpreted). calls: of how many calls, as many batch rows each, the outputs are judged together.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    keep: int
    is_causal: bool = True
    lengths: bool = False
    documents: bool = False
    add_scores: bool = True
    ties: bool = False
    lse_grad: bool = True
    sinks: int = 0
    window: int = 0
    calls: int = 1
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


_SIZES = {"batch": 3, "heads": 2, "kv_heads": 2, "q_len": 150, "kv_len": 150, "head_dim": 16, "keep": 12}


def _case(name: str, *tags: str, **different) -> DynamicMaskCase:
    return DynamicMaskCase(name, **{**_SIZES, **different}, tags=frozenset(tags))


def _features() -> list[DynamicMaskCase]:
    return [
        _case("causal", "quick"),
        _case("window-of-one", keep=1),
        _case("everything-kept", keep=400),
        _case("ties", "quick", ties=True),
        _case("fewer-queries", q_len=37),
        _case("one-query", "quick", q_len=1),
        _case("grouped", "quick", heads=4),
        _case("one-key-head", heads=3, kv_heads=1),
        _case("not-causal", is_causal=False),
        _case("not-causal-more-queries", is_causal=False, q_len=170),
        _case("lengths", "quick", lengths=True),
        _case("documents", documents=True),
        _case("documents-lengths-grouped-ties", "quick", documents=True, lengths=True, heads=4, ties=True),
        _case("documents-not-causal", is_causal=False, documents=True, lengths=True),
        _case("ranking-only", add_scores=False),
        _case("no-lse-grad", lse_grad=False),
        _case("sinks", sinks=3),
        _case("window", window=9),
        _case("sinks-window-documents-lengths", "quick", sinks=2, window=5, documents=True, lengths=True, heads=4, ties=True),
        _case("sinks-not-causal", is_causal=False, sinks=3, documents=True),
        _case("window-of-everything", window=400, sinks=400),
    ]


def _sizes() -> list[DynamicMaskCase]:
    cases = [_case(f"length-{t}", batch=1, q_len=t, kv_len=t) for t in (1, 2, 31, 33, 129)]
    cases += [_case(f"dim-{d}", batch=1, q_len=40, kv_len=40, head_dim=d) for d in (1, 24, 64, 80, 128, 256)]
    cases.append(_case("llama-heads", "large", batch=1, heads=8, kv_heads=2, q_len=700, kv_len=700, head_dim=128, keep=128))
    cases.append(_case("decode", "large", batch=2, heads=8, kv_heads=2, q_len=1, kv_len=2000, head_dim=64, keep=256))
    return cases


DYNAMIC_MASK: tuple[DynamicMaskCase, ...] = (*_features(), *_sizes())
