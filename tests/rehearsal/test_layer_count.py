"""Layers counted from a trace on the meta device."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.planner.accelerators import accelerator
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import network
from paceline.planner.memory import largest_batch, step_memory
from paceline.rehearsal.layer_count import count_layers, count_module, count_trained


@pytest.mark.parametrize("name", ["resnet50", "resnet18", "alexnet_bn"])
def test_a_traced_network_is_the_written_one(name: str) -> None:
    """Two independent counts: of operations, and by hand."""
    traced, written = count_layers(name), network(name)
    assert traced.elements == written.elements
    assert {t.name: (t.elements, t.half) for t in traced.tensors} == {
        t.name: (t.elements, t.half) for t in written.tensors
    }
    assert traced.flops == pytest.approx(written.flops, rel=0.01)
    gpu = accelerator("H100")
    for batch in (16, 256):
        one, other = (analytic_workload(net, gpu).compute_s(batch) for net in (traced, written))
        assert one == pytest.approx(other, rel=0.04)


# How much more memory a trace counts at batch 256 than a step with our kernels takes, which keep no map
# between a norm and the pool behind it, and a byte for the place of a maximum, but windows of images.
FUSED = {"resnet50": 1.07, "resnet18": 1.27, "alexnet_bn": 1.18, "alexnet": 1.00}


@pytest.mark.parametrize("name", list(FUSED))
def test_what_a_traced_network_keeps_is_the_unfused_count(name: str) -> None:
    traced, written = count_layers(name), network(name)
    for half in (True, False):
        unfused = step_memory(written, 256, half, fused=False).total
        assert step_memory(traced, 256, half).total == pytest.approx(unfused, rel=0.03)
    fused = step_memory(written, 256).total
    assert step_memory(traced, 256).total / fused == pytest.approx(FUSED[name], abs=0.03)
    for chip in ("P40", "CPU"):
        most, other = (largest_batch(net, accelerator(chip)) for net in (traced, written))
        assert most == pytest.approx(other, rel=0.01)


def test_a_pool_reads_its_input_and_writes_its_output() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    pool = count_module(model, "made", 32).layers[1]
    assert "pool" in pool.name
    assert pool.moved == 8 * (32 * 32 + 16 * 16)


class Attention(nn.Module):
    """A block of a vision transformer: patches, attention, a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 16, 16)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head((x + self.wide(x)).mean(1))


def make_attention(num_classes: int = 10, **_: object) -> nn.Module:
    return Attention()


def test_products_of_attention_count() -> None:
    tokens, width = 14 * 14, 64
    with torch.device("meta"):
        net = count_module(Attention(), "attention", 224)
    linear = 2 * tokens * (3 * 256 * width + width * 192 + 2 * width * 256) + 2 * width * 10
    attention = 2 * 2 * tokens * tokens * width
    assert net.flops == pytest.approx(linear + attention, rel=0.01)
    assert net.elements == sum(p.numel() for p in Attention().parameters())
    ready = [g.ready for g in analytic_workload(net, accelerator("A100")).gradients]
    assert ready == sorted(ready)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return y.permute(0, 3, 1, 2) * self.scale.reshape(1, -1, 1, 1) + x


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)]
    for width, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width > 96:
            parts += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        parts += [ConvNeXtBlock(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000)]
    return nn.Sequential(*parts, *head)


class VisionTransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        q, k, v = self.qkv(self.first(x)).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.project(y.transpose(1, 2).reshape(x.shape))
        return x + self.wide(self.second(x))


class VisionTransformer(nn.Module):
    """ViT-S/16, but for the class token: the mean of 197 positions is as long."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 384))
        self.places = nn.Parameter(torch.zeros(1, 197, 384))
        self.blocks = nn.Sequential(*(VisionTransformerBlock(384, 6) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(384), nn.Linear(384, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


# MiB at the peak of a step of timm's models on an H200, fp16, without torch.compile
# (records/planner/data.jsonl).
PEAKS = {
    convnext_tiny: {8: 973.4, 64: 4300.8, 512: 31239.7},
    VisionTransformer: {8: 673.3, 64: 2584.7, 512: 17588.2},
}


@pytest.mark.parametrize("make", list(PEAKS), ids=["convnext_tiny", "vit_small"])
def test_what_autocast_keeps_is_counted_in_its_formats(make: Callable[[], nn.Module]) -> None:
    """Layer norms compute in fp32 and keep their inputs; attention keeps no probabilities."""
    with torch.device("meta"):
        model = make()
    net = count_module(model, "net", 224)
    for batch, peak in PEAKS[make].items():
        assert step_memory(net, batch).total / 2**20 == pytest.approx(peak, rel=0.05)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # The input of the first norm, in fp32, is the output of the convolution before it.
    before = net.layers[0]
    assert before.name.endswith("convolution")
    assert before.half_kept == 2 * before.kept


class Mixer(nn.Module):
    """Linear layers over positions, a product with a parameter, attention in windows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.over = nn.Linear(16, 16)
        self.raw = nn.Parameter(torch.zeros(512, 512))
        self.wide = nn.Linear(8, 512)
        self.head = nn.Linear(512, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2)
        x = (x + self.over(x)).transpose(1, 2)
        windows = x.reshape(len(x), 1, 4, 4, 8)
        x = nn.functional.scaled_dot_product_attention(windows, windows, windows).reshape(x.shape)
        return self.head((self.wide(x) @ self.raw).mean(1))


def test_parameters_in_half_precision_are_no_activations() -> None:
    with torch.device("meta"):
        net = count_module(Mixer(), "mixer", 16)
    assert sum(layer.kept for layer in net.layers) < 512 * 512 / 4
    halves = [layer.half_kept for layer in net.layers]
    assert None not in halves
    assert sum(half for half in halves if half is not None) < 512 * 512 / 4


def test_a_model_with_formats_of_its_own_is_counted_in_one() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert next(self.parameters()).dtype == x.dtype
            return super().forward(x)  # type: ignore[no-any-return]

    made = Own(nn.Conv2d(3, 4, 1), nn.LayerNorm((4, 2, 2)), nn.Flatten(), nn.Linear(16, 4))
    net = count_module(made.to("meta"), "own", 2)
    assert {layer.half_kept for layer in net.layers} == {None}
    assert net.layers[0].kept > 0
    assert net.layers[0].kept_bytes(2, fused=True) == 2 * net.layers[0].kept
    assert {p.dtype for p in made.parameters()} == {torch.float32}


def test_the_planner_takes_any_factory() -> None:
    flags = [
        "plan",
        "--gpu",
        "A100",
        "--model",
        "rehearsal.test_layer_count:make_attention",
        "--json",
    ]
    done = CliRunner().invoke(app, flags, catch_exceptions=False)
    found = json.loads(done.output)
    assert found["model"].endswith("make_attention")
    assert found["memory"]["total"] > 0
    assert found["recommended_batch"]


def test_a_model_that_looks_at_values_is_refused_in_one_line() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x * int(x.sum().item())

    with pytest.raises(ConfigError, match="paceline profile"):
        count_module(Looks(2, 2).to("meta"), "looks", 32)


class Draws(nn.Module):
    """Batch norm and dropout, a frozen layer, and numbers from Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)
        self.conv.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        scale = 1 + random.random() + np.random.rand() + float(torch.rand(()))
        x = nn.functional.dropout(self.norm(self.conv(images)), 0.5, self.training)
        return self.fc(x.mean((2, 3))) * scale


def test_counting_leaves_a_model_and_all_generators_as_they_are() -> None:
    model = Draws()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    net = count_trained(model, "draws", 28, channels=1)
    assert (random.getstate(), str(np.random.get_state())) == drawn[:2]
    assert torch.equal(torch.get_rng_state(), drawn[2])
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not model.conv.weight.requires_grad
    assert model.fc.weight.device.type == "cpu"
    # Of a step that trains all tensors.
    assert {t.name for t in net.tensors} == set(dict(model.named_parameters()))
    assert net.flops == pytest.approx(2 * (26 * 26 * 8 * 9 + 8 * 4), rel=0.01)
    assert net.traced


def test_a_model_that_cannot_be_copied_is_refused_in_one_line() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be copied"):
        count_trained(model, "locked", 32, channels=3)
