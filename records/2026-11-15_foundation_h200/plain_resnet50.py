"""The peer: a plain PyTorch loop on torchvision's ResNet-50, batch 256, images already on the GPU."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
import torchvision

torch.backends.cudnn.benchmark = False
model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (256,), device="cuda")
times = []
for _ in range(45):
    torch.cuda.synchronize()
    started = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
    optimizer.step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - started)
print(f"plain PyTorch, median of 35 steps: {256 / statistics.median(times[10:]):.0f} images/s")
