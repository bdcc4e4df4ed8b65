"""The launches of a ResNet-50 step, counted without a GPU, are those that the GPU tests ran.

A launch is a kernel with its grid, shapes, strides and constants, or a plan of cuDNN. The digests were
recorded on commit 6349ddd8, before models were plain. After a change of the launches that GPU tests have
confirmed, replace them with what the failing test shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.forms import use_forms
from accel.test_kept_maps import OnGpu, in_half, replace_kernels
from interpreter_run import needs_triton
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings

pytestmark = needs_triton

# Products, recomputed norms, and the form that is preferred: number of launches and their digest.
STEPS = {
    (False, False, ""): (318, "e28a68325f1f"),
    (False, True, ""): (357, "53340a1364d7"),
    (True, False, "fused"): (314, "c9db16d2f149"),
    (True, True, "fused"): (337, "3eb1c7bbc82d"),
    (True, False, "both"): (307, "2d342e6f3b82"),
    (True, False, "separate"): (318, "26f7437bec2a"),
    (True, False, "cudnn statistics"): (267, "3975cba76ef4"),
    (True, False, "cudnn reference"): (248, "ae8d91f7ee17"),
    (True, True, "cudnn reference"): (255, "979e9ba20bd5"),
}


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{tuple(value.shape)}/{tuple(value.stride())}"
    if type(value).__name__ == "TensorDescriptor":
        parts = (list(value.shape), list(value.strides), list(value.block_shape))
        return f"desc({shown(value.base)},{','.join(map(str, parts))})"
    return repr(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from paceline.accel import cudnn_forms

    seen: list[str] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*given: object, **options: object) -> None:
                constants = [f"{name}={shown(value)}" for name, value in sorted(options.items())]
                words = [f"{self.name}{grid}", *map(shown, given)]
                seen.append(f"{' '.join(words)} {' '.join(constants)}")

            return launch

    class Plan:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def run(self, tensors: dict[str, Tensor]) -> None:
            words = " ".join(f"{name}={shown(value)}" for name, value in sorted(tensors.items()))
            seen.append(f"cudnn {len(self.graph.nodes)} {self.graph.work()} {words}")

    replace_kernels(monkeypatch, Kernel)
    monkeypatch.setattr(cudnn_forms, "check", lambda *_, **__: None)
    monkeypatch.setattr(cudnn_forms, "plans", lambda graph, *_: {"reference": Plan(graph)})
    for cached in ("_forward_plans", "_input_plans", "_weight_plans"):
        getattr(cudnn_forms, cached).cache_clear()
    return seen


def preferred(form: str) -> Choices:
    choices = Choices(CUDNN if form.startswith(CUDNN) else "on", open=True)

    def choose(key: str, forms: dict[str, object], *_: object) -> str:
        if form == "separate" and form in forms:
            return form
        wanted = [name for name in forms if name.startswith(form) and form != "separate"]
        others = [name for name in forms if name.startswith(CUDNN)]
        return [*wanted, *others, *(name for name in forms if name != "separate"), *forms][0]

    choices.choose = choose  # type: ignore[method-assign, assignment]
    return choices


@pytest.mark.parametrize(("products", "recompute", "form"), STEPS)
def test_launches_of_a_step(
    products: bool, recompute: bool, form: str, launches: list[str]
) -> None:
    with torch.device("meta"):
        net = in_half(create_model(ModelSettings("resnet50"), num_classes=1000))
        images = torch.empty(8, 4, 224, 224, dtype=torch.float16)
        labels = torch.zeros(8, dtype=torch.int64)
    use_forms(net, fused=True, recompute=recompute, choices=preferred(form) if products else None)
    with OnGpu():
        x = images.contiguous(memory_format=torch.channels_last)
        F.cross_entropy(net(x).float(), labels).backward()  # type: ignore[no-untyped-call]
    found = len(launches), hashlib.sha256("\n".join(launches).encode()).hexdigest()[:12]
    assert found == STEPS[products, recompute, form]
