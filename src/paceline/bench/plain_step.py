"""A training step as people write it in plain PyTorch: the peer.

In: a row with number format and compile mode. Out: the time of autocast, torch.compile, channels_last,
cudnn.benchmark, fused momentum SGD and, for fp16, torch's GradScaler, on normalised images that lie
on the device. The model is ours with torch's own operators: torchvision's architecture and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench.step_row import StepRow
from paceline.bench.timing import Times, steady_times
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Steps that a loop without synchronisation may run ahead; its own limit is the launch queue.
_LAG = 2


def measure(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    """`switches`: dtype, compile, channels_last."""
    device, kind = torch.device(row.device), row.switches["dtype"]
    how, nhwc = row.switches.get("compile", "off"), row.switches.get("channels_last", True)
    strict = kind == "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not strict
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    settings = ModelSettings(name=row.model)
    model = create_model(settings, num_classes=row.classes, image_size=row.image_size).to(device)
    images = torch.randn(row.batch_size, 3, row.image_size, row.image_size, device=device)
    if nhwc:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, row.classes, (row.batch_size,), device=device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5,
        fused=True if device.type == "cuda" else None,
    )  # fmt: skip
    forward: Callable[[Tensor], Tensor] = model
    if how != "off":
        forward = torch.compile(model, mode=None if how == "default" else how)
    scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")
    amp = _AMP.get(kind)
    done: list[torch.cuda.Event] = []

    def launch(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, amp) if amp else nullcontext():
            loss = F.cross_entropy(forward(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        if device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            done.append(event)

    def wait() -> None:
        if done:
            done.pop(0).synchronize()

    times = steady_times(
        launch, wait, lag=_LAG, repeats=row.steps, warm_up=row.warm_up, ready=ready
    )
    return times, f"{kind}, compile {how}, {'NHWC' if nhwc else 'NCHW'}, fused SGD"
