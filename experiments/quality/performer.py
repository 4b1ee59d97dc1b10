"""Mean squared error of the softmax kernel, N:M pruning beside Performer's random features (Dfss, appendix A.5, Eq. 28 to 31).

    python experiments/quality/performer.py [--out benchmarks/results/cpu] [--trials 200000]        # a CPU, a minute

The kernel is `SM(q, k) = exp(q k / sqrt d)`, before any normalisation, for one query and one key whose score s = q k / sqrt d is
given. Errors are relative, `E[(estimate - SM)^2] / SM^2`, over what each way draws:

    1:2, 2:4       the other 1 or 3 keys of the group, standard normal: 0 stands for SM if the key is pruned. With
                   r = P(another score is larger) = (1 - erf(q k / (|q| sqrt 2))) / 2 this is r (Eq. 30), and 3 r^2 - 2 r^3 with 2:4
    performer      m positive random features, independent: (exp(|q + k|^2 / sqrt d) - 1) / m, Lemma 2 of the Performer paper
    performer orthogonal    the same features in orthogonal blocks of d: at most the above less
                   2 / (d + 2) * (share of pairs in one block) * (1 - exp(-|q + k|^2 / (2 sqrt d)))^2
                   after Theorem 2 of the Performer paper, which is for m <= d. Eq. 31 (`printed`) leaves out the exponential and
                   subtracts a constant instead, so it is looser at most scores and below 0 where the error vanishes

A simulation stands beside each closed form where it can converge. The features are lognormal with a variance of |q + k|^2 / sqrt d
in the exponent; beyond `MOST_EXPONENT` of it the mean square is made of draws that are too rare to be met.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import machine as provenance
import plot_style as style

DIM, FEATURES = 64, 266  # m = d ln d, as in the paper
NORMS = (64.0, 8.0)  # |q|^2 and |k|^2: those of standard normal vectors, which the paper assumes, and smaller ones
POINTS = 21
MOST_EXPONENT = 2.5
_PART = 10_000  # trials at a time: 26 MB of features
LOOKS = {
    "1:2": style.Look("saccade 1:2", style.SACCADE.colour, "o"),
    "2:4": style.Look("saccade 2:4", style.SACCADE.colour, "s"),
    "performer": style.LOOKS["performer"],
    "performer orthogonal": style.LOOKS["performer orthogonal"],
}


@dataclass(frozen=True)
class Setting:
    """`norm` is |q|^2 = |k|^2, `score` is q k / sqrt d, which lies within norm / sqrt d."""

    dim: int
    features: int
    norm: float
    score: float

    def exponent(self) -> float:
        """`|q + k|^2 / sqrt d`, the variance of the exponent of one feature."""
        return 2 * self.norm / math.sqrt(self.dim) + 2 * self.score

    def pruned(self) -> float:
        """r: the chance that the score of a standard normal key is larger, `q k' ~ N(0, |q|^2)`."""
        return (1 - math.erf(self.score * math.sqrt(self.dim / (2 * self.norm)))) / 2


def closed_form(way: str, given: Setting) -> float:
    """The relative mean squared error; a bound for orthogonal features, at least 0."""
    r = given.pruned()
    if way in ("1:2", "2:4"):
        return r if way == "1:2" else 3 * r**2 - 2 * r**3
    independent = math.expm1(given.exponent()) / given.features
    gain = math.expm1(-given.exponent() / 2) ** 2 if way == "performer orthogonal" else 0.0
    return max(0.0, independent - 2 / (given.dim + 2) * _pairs(given) * gain)


def printed(given: Setting) -> float:
    """Eq. 31 as it is printed, over `SM^2`."""
    m = given.features
    return (math.expm1(given.exponent()) - (1 - 1 / m) * 2 / (given.dim + 2)) / m


def _pairs(given: Setting) -> float:
    """The share of all pairs of features, each with itself too, that are two of one block."""
    whole, rest = divmod(given.features, given.dim)
    return (whole * given.dim * (given.dim - 1) + rest * (rest - 1)) / given.features**2


def squared_errors(way: str, given: Setting, trials: int, generator: torch.Generator) -> Tensor:
    """Relative squared errors, float64 `[trials]`, of as many independent estimates."""
    if way in ("1:2", "2:4"):
        others = math.sqrt(given.norm / given.dim) * _normal((trials, 1 if way == "1:2" else 3), generator)
        return ((others > given.score).sum(1) >= (1 if way == "1:2" else 2)).double()
    if way == "performer":
        projected = _normal((trials, given.features), generator)
    else:
        projected = _orthogonal((trials, given.features), given.dim, generator)
    # with w u the projection on q + k: phi(q) phi(k) / SM = exp(w u sqrt(L) - L / 2), L the exponent
    exponent = max(0.0, given.exponent())
    estimates = torch.exp(projected * math.sqrt(exponent) - exponent / 2).mean(1)
    return (estimates - 1) ** 2


def _normal(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=generator)


def _orthogonal(size: tuple[int, int], dim: int, generator: torch.Generator) -> Tensor:
    """The results of blocks of orthogonal features on one direction: a random rotation of a unit vector is a uniform unit vector, and
    each feature has the length of a normal vector of its own."""
    trials, features = size
    blocks = -(-features // dim)
    unit = torch.nn.functional.normalize(_normal((trials * blocks, dim), generator), dim=-1).view(trials, -1)[:, :features]
    shape = torch.full((trials, features), dim / 2, dtype=torch.float64)
    return unit * (2 * torch._standard_gamma(shape, generator)).sqrt()


def simulate(way: str, given: Setting, trials: int) -> tuple[float, float]:
    """The mean of the squared errors and the standard error of that mean."""
    generator = torch.Generator().manual_seed(0)
    parts = [min(_PART, trials - i) for i in range(0, trials, _PART)]
    found = torch.cat([squared_errors(way, given, part, generator) for part in parts])
    return found.mean().item(), (found.std() / math.sqrt(trials)).item()


def settings() -> Iterator[Setting]:
    """Scores from -2 to 4 for standard normal vectors, where the largest possible is 8, and all that smaller ones can have."""
    for norm in NORMS:
        most = norm / math.sqrt(DIM)
        low, high = max(-2.0, -most), min(4.0, most)
        yield from (Setting(DIM, FEATURES, norm, low + (high - low) * i / (POINTS - 1)) for i in range(POINTS))


def measure(trials: int, every: Callable[[], Iterator[Setting]] = settings) -> list[dict[str, object]]:
    """A row for each setting and way."""
    found: list[dict[str, object]] = []
    where = provenance.machine()
    for given in every():
        for way in LOOKS:
            row = {**asdict(given), "way": way, "closed_form": closed_form(way, given)}
            row["printed"] = printed(given) if way == "performer orthogonal" else ""
            row |= {"simulated": "", "standard_error": "", "trials": ""}
            if ":" in way or given.exponent() <= MOST_EXPONENT:
                mean, error = simulate(way, given, trials)
                row |= {"simulated": mean, "standard_error": error, "trials": trials}
            found.append(row | where)
    return found


def crossing(found: list[dict], way: str, norm: float) -> float | None:
    """The least score from which on `way` has the smaller error than independent features; None if there is none."""
    mine = {float(r["score"]): float(r["closed_form"]) for r in found if r["way"] == way and float(r["norm"]) == norm}
    theirs = {float(r["score"]): float(r["closed_form"]) for r in found if r["way"] == "performer" and float(r["norm"]) == norm}
    better = [score for score in sorted(mine) if all(mine[s] < theirs[s] for s in mine if s >= score)]
    return better[0] if better else None


def write(found: list[dict[str, object]], path: Path) -> Path:
    """Write rows as a CSV, in a folder that is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as handle:
        writer = csv.DictWriter(handle, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in found)
    return path


def draw(found: list[dict], path: Path) -> list[Path]:
    """Closed forms as lines, simulations as markers: `.png` and `.dark.png` beside the CSV."""
    return style.save(path, lambda: _figure(found))


def _figure(found: list[dict]) -> Any:
    norms = sorted({float(r["norm"]) for r in found}, reverse=True)
    figure, axes = style.panels(1, len(norms), 3.9)
    for axis, norm in zip(axes[0], norms, strict=True):
        for way, look in LOOKS.items():
            mine = [r for r in found if r["way"] == way and float(r["norm"]) == norm]
            # an error of exactly 0 has no place on a logarithmic axis
            lines = [(float(r["score"]), float(r["closed_form"])) for r in mine if float(r["closed_form"]) > 0]
            points = [(float(r["score"]), float(r["simulated"])) for r in mine if r["simulated"] not in ("", "0")]
            dash = style.DASHES[1 if way in ("2:4", "performer orthogonal") else 0]
            axis.plot(*zip(*lines, strict=True), color=look.colour, linestyle=dash, label=look.name)
            if points:
                axis.plot(*zip(*points, strict=True), look.marker, color=look.colour, markersize=4, zorder=4)
        axis.set_yscale("log")
        axis.set_ylim(bottom=1e-4)
        axis.set_xlabel(r"score $q k / \sqrt{d}$ of the key")
        axis.set_title(f"|q|² = |k|² = {norm:g}" + (", as of standard normal vectors" if norm == DIM else ""))
    axes[0, 0].set_ylabel("mean squared error / SM²")
    first = found[0]
    style.head(
        figure, "Error of the softmax kernel, lines: closed forms, markers: simulation",
        ["performer_mse", f"CPU, float64, D = {first['dim']}, {first['features']} features", str(first["date"])],
    )  # fmt: skip
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    parser.add_argument("--trials", type=int, default=200_000)
    given = parser.parse_args(arguments)
    path = write(measure(given.trials), given.out / "performer_mse.csv")
    with open(path, newline="") as handle:
        found = list(csv.DictReader(handle))
    for norm in NORMS:
        for way in ("1:2", "2:4"):
            print(f"|q|^2 = |k|^2 = {norm:g}: {way} has the smaller error from score {crossing(found, way, norm)} on")
    print(path)
    print(*draw(found, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
