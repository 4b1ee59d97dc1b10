"""Pictures of eight shapes, drawn by rule: 32 x 32 grey pixels for a task that reads them as a sequence.

A picture has one shape of brightness a on a ground of brightness b, |a - b| >= 48 of 255, either of them the brighter; the shape's bounding
box is a square of 10 to 26 pixels at any place. Onto it come a gradient of up to 40 grey levels in any direction, 12 specks of one pixel
each and normal noise of 12 levels. The differences from CIFAR-10 are: no photographs, eight classes, and a rule that tells the classes apart
without error if there is no noise. So accuracies are not comparable with those of other works.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLASSES = ("disc", "square", "triangle", "ring", "frame", "plus", "rows", "columns")
SIDE = 32
SMALLEST, LARGEST = 10, 26
CONTRAST, GRADIENT, NOISE, SPECKS = 48, 40, 12.0, 12


def draw(count: int, seed: int, plain: bool = False) -> tuple[Tensor, Tensor]:
    """(pixels uint8 `[count, 1024]`, row by row; classes int64 `[count]`). plain: shape and ground alone."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(len(CLASSES), (count,), generator=generator)
    pixels = [_some(part, generator, plain) for part in classes.split(4096)]  # 17 MB for each intermediate of so many
    return torch.cat(pixels), classes


def _some(classes: Tensor, generator: torch.Generator, plain: bool) -> Tensor:
    count = len(classes)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    size = torch.randint(SMALLEST, LARGEST + 1, (count, 1, 1), generator=generator)
    top, left = ((uniform(1, 1) * (SIDE + 1 - size)).floor() for _ in range(2))
    at = torch.arange(SIDE)
    inside = shape_of(classes, (at[:, None] - top + 0.5) / size, (at - left + 0.5) / size)
    ground = uniform(1, 1) * 255
    # at least CONTRAST away on a circle of 255, hence on the line too
    shape = (ground + CONTRAST + uniform(1, 1) * (255 - 2 * CONTRAST)) % 255
    found = torch.where(inside, shape, ground)
    if plain:
        return found.round().to(torch.uint8).flatten(1)
    angle = uniform(1, 1) * 2 * torch.pi
    slope = ((at[:, None] - SIDE / 2) * angle.sin() + (at - SIDE / 2) * angle.cos()) / SIDE
    found = found + GRADIENT * uniform(1, 1) * slope + NOISE * torch.randn(found.shape, generator=generator)
    specks = torch.randint(SIDE * SIDE, (count, SPECKS), generator=generator)
    found = found.flatten(1).scatter(1, specks, 255 * uniform(SPECKS))
    return found.clamp(0, 255).round().to(torch.uint8)


def shape_of(classes: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The pixels that are inside: bool `[N, S, S]` of classes `[N]` and places in the bounding box, 0 to 1, `[N, S, 1]` and `[N, 1, S]`."""
    box = (down >= 0) & (down < 1) & (right >= 0) & (right < 1)
    from_centre = (down - 0.5).square() + (right - 0.5).square()
    edge = torch.maximum((down - 0.5).abs(), (right - 0.5).abs())
    disc, third = from_centre < 0.25, ((down - 0.5).abs() < 1 / 6) | ((right - 0.5).abs() < 1 / 6)
    shapes = (
        disc, box, (right - 0.5).abs() < down / 2, disc & (from_centre >= 0.09), edge >= 0.3, third,
        ((down * 5).floor() % 2 == 0).expand_as(box), ((right * 5).floor() % 2 == 0).expand_as(box),
    )  # fmt: skip
    chosen = torch.stack([shape & box for shape in shapes]).gather(0, classes.view(1, -1, 1, 1).expand(1, *box.shape))
    return chosen[0]
