"""What `WeightAverage.add` costs on a GPU: ResNet-50, recorded, median of 50 replays after 10."""

from __future__ import annotations

import statistics

import torch
from paceline.models.roles import parameter_groups
from paceline.train.weight_average import WeightAverage

from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.optim.lars import LARS
from paceline.train.batch_norm import BatchNormState

settings = ModelSettings(name="resnet50")
model = create_model(settings, num_classes=1000, in_channels=3, image_size=224)
model = model.to(memory_format=torch.channels_last).cuda()
norms = BatchNormState(model)
for p in model.parameters():
    if p.dim() > 1:
        p.data = p.data.half()
lars = LARS(parameter_groups(model, 5e-5), lr=1.0)
average = WeightAverage(model, lars, norms, 100.0)
halted = torch.zeros((), device="cuda")
times = []
with torch.no_grad():
    for _ in range(3):
        average.add(halted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        average.add(halted)
    for _ in range(60):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
kept = sum(weights.numel() for weights in average.weights) * 4 / 2**20
reserved = torch.cuda.memory_reserved() / 2**20
print(f"average.add: {statistics.median(times[10:]):.3f} ms, {kept:.0f} MiB kept, "
      f"reserved {reserved:.0f} MiB")  # fmt: skip
