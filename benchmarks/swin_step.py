"""A training step of Swin-T for the table of models: timm's own layers with their fused attention off, as timm ships them, and on,
beside the same model under `saccade.integrations.timm.patch`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from encoder_check import Variant, over_budget
from encoders import Encoder, image_batch, training_step
from rows import Row, Writer
from torch import Tensor, nn

from saccade.hardware import has_package
from saccade.testing.timing import kernel_time, throughput_in_turns

BATCH, SIZE, MODEL = 64, 224, "swin_tiny_patch4_window7_224"
SWIN = f"Swin-T B={BATCH} size={SIZE}"


class Swin(Encoder):
    """A model of timm with the same head as other encoders of the table."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.num_features, "mean")

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """`[B, E]`."""
        found = self.model(inputs["pixel_values"])
        return found if found.dtype == torch.float64 else found.float()


def variants(model: nn.Module, device: str, dtype: torch.dtype) -> dict[str, Variant]:
    """timm's model, the same with its fused attention on, and the same under ours."""
    from saccade.integrations.timm import patch

    stock = Swin(model).to(device, dtype).eval()
    fused, ours = copy.deepcopy(stock), copy.deepcopy(stock)
    for encoder, on in ((stock, False), (fused, True)):
        for layer in encoder.model.modules():
            if hasattr(layer, "fused_attn"):
                layer.fused_attn = on  # type: ignore[assignment]  # a plain flag of timm's layers
    patch(ours.model)
    return {"unfused": Variant(stock), "fused": Variant(fused), "saccade": Variant(ours)}


def measure_swin(writer: Writer, repeat_ms: int, rounds: int, device: str, dtype: torch.dtype, **sizes: Any) -> None:
    """Check, time and write; `stock` is the faster of timm's two settings. sizes: arguments of timm in the place of Swin-T's."""
    if not has_package("timm"):
        print("Swin-T is left out: timm is not installed (pip install timm)", flush=True)
        writer.part.left.append(f"{SWIN} fwd+bwd")
        return
    import timm

    torch.manual_seed(0)
    size = sizes.get("img_size", SIZE)
    found = variants(timm.create_model(MODEL, num_classes=0, **sizes), device, dtype)
    batch = image_batch(size, BATCH, device, dtype)
    ratios = over_budget(found["unfused"], {name: found[name] for name in ("fused", "saccade")}, [batch], gradients=True)
    calls = {name: training_step(variant.encoder, batch.padded, batch.labels) for name, variant in found.items()}
    times = throughput_in_turns(calls, device, rounds, repeat_ms)
    best = min(("unfused", "fused"), key=lambda name: times[name].p50)
    for name, backend in ((best, "stock"), ("saccade", "saccade")):
        if not writer.part.has(backend):
            continue
        busy = kernel_time(calls[name], device)
        note = f"{1e3 * BATCH / times[name].p50:.0f} items/s" + (f"; kernels {busy:.4g} ms" if busy else "")
        note += f"; timm's attention {best}" if backend == "stock" else ""
        row = Row(
            "models",
            f"Swin-T B={BATCH} size={size}",
            backend,
            "fwd+bwd",
            str(dtype).removeprefix("torch."),
            *times[name],
            note=note,
        )
        row.error_ratio = ratios.get(name, "")
        writer.add(row)
    gain = times[best].p50 / times["saccade"].p50
    print(f"Swin-T B={BATCH} fwd+bwd: stock {times[best].p50:.2f} ms ({best}), saccade x{gain:.2f}", flush=True)
