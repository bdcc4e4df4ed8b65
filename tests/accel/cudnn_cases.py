"""Residual blocks with cuDNN's graphs, which torch's operators compute here, in Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

import interpreted  # noqa: F401  (before any kernel)
from accel.graph_reference import ReferencePlan, assert_near_but_for_signs
from accel.norm_reference import assert_near, channels_last, norm_for, random_map
from accel.product_cases import Make, away, basic, every_kind, exactly, images, made, run
from paceline.accel import cudnn_forms, fused_convolutions
from paceline.accel.cudnn_graphs import CudnnError, Graph
from paceline.accel.fused import Moments, apply, join_moments, moments
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices
from paceline.accel.operands import Epilogue, Operand


def of_cudnn() -> Choices:
    return Choices(CUDNN, open=True)


STATISTICS, WHOLE = "cudnn statistics", "cudnn reference"
HALF = torch.float16


@pytest.fixture(params=[STATISTICS, WHOLE])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The forms of cuDNN are there and chosen."""
    wanted: str = request.param

    def choose(
        _: Choices, key: str, forms: dict[str, Callable[[], object]], device: torch.device,
        then: object = None,
    ) -> str:  # fmt: skip
        # What has no form of cuDNN: the gradients of a convolution of a stored map, and of weights.
        return next(
            name for start in (wanted, CUDNN, SEPARATE) for name in forms if name.startswith(start)
        )

    cached = (cudnn_forms._forward_plans, cudnn_forms._input_plans, cudnn_forms._weight_plans)
    monkeypatch.setattr(Choices, "choose", choose)
    monkeypatch.setattr(cudnn_forms, "check", lambda *_, **__: None)
    # Maps of float32 stand for those of float16 here.
    with_halves = partial(join_moments, halves=True)
    monkeypatch.setattr(
        fused_convolutions, "join_moments", lambda sums, norm, **_: with_halves(sums, norm)
    )
    monkeypatch.setattr(cudnn_forms, "plans", lambda graph, *_: {"reference": ReferencePlan(graph)})
    for function in cached:
        function.cache_clear()
    yield wanted
    for function in cached:
        function.cache_clear()


@every_kind
def test_blocks_compute_what_separate_operators_do(make: Make, form: str) -> None:
    """Results agree within the rounding of scale and shift in fp16.

    The images are chosen so that rounding changes no ReLU mask: a single element would count.
    """
    exact = run(exactly(made(False, make=make)), images(torch.float64, 3))
    ours = run(made(True, make=make, choices=of_cudnn()), images(torch.float32, 3))
    for name, value in exact.items():
        assert away(ours[name], value) < (1e-5 if form == STATISTICS else 2e-2), name
    assert all(value == 1 for name, value in ours.items() if name.endswith("tracked"))


@every_kind
def test_half_precision_is_as_near_as_that_of_separate_operators(make: Make, form: str) -> None:
    exact = run(exactly(made(False, HALF, make)), images(HALF).double())
    theirs = run(made(False, HALF, make), images(HALF))
    ours = run(made(True, HALF, make, choices=of_cudnn()), images(HALF))
    assert all(ours[name].dtype == value.dtype for name, value in theirs.items())
    # Of gradients, other signs change; outputs can be compared.
    assert away(ours["y"], exact["y"]) < 2 * away(theirs["y"], exact["y"])
    assert_near_but_for_signs({name: away(ours[name], value) for name, value in exact.items()})


@every_kind
def test_recomputed_maps_and_frozen_weights(make: Make, form: str) -> None:
    plain, net = (
        made(True, make=make, choices=of_cudnn(), recompute=recompute)
        for recompute in (False, True)
    )
    for block in net.blocks:
        block.conv2.weight.requires_grad_(False)
    once = run(plain, images(torch.float32))
    y = net(images(torch.float32).requires_grad_())
    (y.double() * torch.linspace(-1, 1.5, y.numel()).double().view_as(y)).sum().backward()
    assert net.blocks[0].conv2.weight.grad is None
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert away(parameter.grad, once[name]) < 1e-2, name


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("form", [WHOLE], indirect=True)
def test_a_normalized_map_is_computed_again_for_the_weight(stride: int, form: str) -> None:
    x, norm = channels_last(random_map((2, 8, 6, 5), HALF)), norm_for(8)
    saved = join_moments(moments(x), norm, halves=True)
    weight = channels_last(torch.randn(16, 8, 3, 3).half())
    dims = fused_convolutions.out_dims(tuple(x.shape), tuple(weight.shape), stride)
    gradient = channels_last(torch.randn(dims).half())
    inputs = Operand.normalized(x, saved)
    found = fused_convolutions._stored_weight_gradient(of_cudnn(), gradient, weight, inputs, stride)
    y = apply(x, saved, None, relu=True)
    wanted = conv2d_weight(y.double(), weight.shape, gradient.double(), stride, 1)
    assert away(found, wanted) < 3e-3


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_statistics_from_sums_about_zero(mean: float) -> None:
    x = channels_last(torch.randn(4, 16, 5, 5) + mean)
    norm = norm_for(16)
    norm.running_mean.fill_(-7.0)  # is no centre of these sums
    sums = torch.stack((x.sum((0, 2, 3)), x.square().sum((0, 2, 3))))[:, None]
    saved = join_moments(Moments(sums, 100, centred=False), norm, halves=True)
    exact = x.double().transpose(0, 1).flatten(1)
    assert_near(saved[0], exact.mean(1), 1e-5)
    assert_near(saved[1], (exact.var(1, correction=0) + norm.eps).rsqrt(), 1e-4)
    scale, shift = saved[4].view(HALF).chunk(2)
    assert torch.equal(scale, saved[2].half())
    # With the rounded scale, the mean still becomes β.
    assert torch.equal(shift, (norm.bias - saved[0] * scale.float()).half())
    rounding = 2**-11 * (shift.abs() + 1e-3)
    assert ((saved[0] * scale.float() + shift.float() - norm.bias).abs() <= rounding).all()
    assert_near(norm.running_mean, -7 + norm.momentum * (exact.mean(1) + 7), 1e-5)


def test_only_cudnn_gets_scale_and_shift_in_half_precision() -> None:
    """The statistics of every other run, and their memory, are as without cuDNN."""
    x = channels_last(random_map((2, 8, 6, 5), HALF))
    plain, more = (join_moments(moments(x), norm_for(8), halves=halves) for halves in (False, True))
    assert (plain.shape, more.shape) == ((4, 8), (5, 8))
    assert torch.equal(plain, more[:4])


@pytest.mark.parametrize("mode", ["off", "auto", "on"])
def test_without_the_mode_cudnn_is_not_asked(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions without Triton kernels are not counted, timed or named."""
    asked: list[str] = []

    def choose(_: Choices, key: str, forms: dict[str, Callable[[], object]], *rest: object) -> str:
        assert not any(name.startswith(CUDNN) for name in forms)
        assert all(then is None for then in rest[1:])
        asked.append(key)
        return SEPARATE if SEPARATE in forms else next(iter(forms))

    monkeypatch.setattr(Choices, "choose", choose)
    monkeypatch.setattr(cudnn_forms, "plans", lambda *_: pytest.fail("asked"))
    run(made(True, choices=Choices(mode, open=True)), images(torch.float32))
    assert asked
    assert not any("3/" in key or "recomputed" in key for key in asked)


def test_what_cudnn_refuses_has_the_next_form_and_a_reason() -> None:
    choices = of_cudnn()
    wanted = run(made(False, torch.bfloat16), images(torch.bfloat16))
    found = run(made(True, torch.bfloat16, choices=choices), images(torch.bfloat16))
    assert found.keys() == wanted.keys()
    outer = {why for key, why in choices.missing.items() if key.startswith(("forward", "backward"))}
    assert outer == {"needs fp16, not bfloat16"}


@pytest.mark.parametrize("form", [WHOLE], indirect=True)
def test_a_refusal_does_not_keep_the_maps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of autograd that lives until the garbage collector comes fills memory, and its nodes carry
    the stream of a warm-up into a capture."""

    def plans(graph: Graph, *_: object) -> dict[str, ReferencePlan]:
        if any(value.name == "residual" for value in graph.values):
            raise CudnnError("no engine takes it")
        return {"reference": ReferencePlan(graph)}

    monkeypatch.setattr(cudnn_forms, "plans", plans)
    net = made(True, make=basic, choices=of_cudnn())
    gc.collect()
    gc.disable()
    try:
        x = images(torch.float32).requires_grad_()
        kept = weakref.ref(x)
        net(x).sum().backward()
        del x
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", [WHOLE], indirect=True)
def test_a_refused_join_leaves_a_basic_block_the_statistics(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN 9.19 takes a residual sum before 1 × 1 convolutions only, and behind the gradient of those of
    stride 1."""
    built: list[Graph] = []

    def has_residual(graph: Graph) -> bool:
        return any(value.name == "residual" for value in graph.values)

    def plans(graph: Graph, *_: object) -> dict[str, ReferencePlan]:
        strided = any(node.stride > 1 for node in graph.nodes)
        if has_residual(graph) and (strided or graph.work()[0] == "forward"):
            raise CudnnError("no engine takes it")
        built.append(graph)
        return {"reference": ReferencePlan(graph)}

    monkeypatch.setattr(cudnn_forms, "plans", plans)
    choices = of_cudnn()
    exact = run(exactly(made(False, make=basic)), images(torch.float64, 3))
    ours = run(made(True, make=basic, choices=choices), images(torch.float32, 3))
    for name, value in exact.items():
        assert away(ours[name], value) < 2e-2, name
    first = [graph.work()[0] for graph in built if has_residual(graph)]
    assert first == ["input"], "behind the only conv1 of stride 1 of a pending map"
    assert {graph.work()[0] for graph in built} == {"forward", "input", "weight"}
    assert [key.split()[0] for key in choices.missing] == ["backward"]
    assert set(choices.missing.values()) == {"no engine takes it"}


def test_maps_and_weights_that_cudnn_would_misread_are_refused() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    def on_gpu(x: Tensor) -> Tensor:
        return x.as_subclass(OnGpu)

    x = on_gpu(channels_last(torch.zeros(2, 8, 4, 4).half()))
    weight, gamma = channels_last(torch.zeros(16, 8, 3, 3).half()), torch.ones(8)
    cudnn_forms.check(weight, x, None, vectors=[gamma])
    flat = torch.zeros(weight.numel() + 1, dtype=HALF)
    shifted = flat[1:].view(16, 3, 3, 8).permute(0, 3, 1, 2)
    for reason, args, vectors in (
        ("needs fp16, not bfloat16, float16", (weight, x.bfloat16()), [gamma]),
        ("needs a GPU", (weight, torch.zeros(2, 8, 4, 4).half()), [gamma]),
        ("needs a multiple of 8 channels", (weight[:12], x), [gamma]),
        ("needs tensors at multiples of 16 bytes", (shifted, x), [gamma]),
        ("needs tensors at multiples of 16 bytes", (weight, x), [torch.ones(9)[1:]]),
        ("needs channels-last memory", (weight, on_gpu(x.contiguous())), [gamma]),
        ("needs norms in float32", (weight, x), [gamma.half()]),
    ):
        with pytest.raises(CudnnError, match=f"^{reason}$"):
            cudnn_forms.check(*args, vectors=vectors)


def test_a_known_choice_builds_its_plan_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plan no longer exists, there is a reason."""
    built: list[str] = []

    def plans(graph: Graph, device: object, most: int, only: str = "") -> dict[str, ReferencePlan]:
        names = [only] if only else [f"engine{number}" for number in range(most)]
        if "engine9" in names:
            raise CudnnError("no engine takes it")
        built.extend(names)
        return {name: ReferencePlan(graph) for name in names}

    monkeypatch.setattr(cudnn_forms, "plans", plans)
    monkeypatch.setattr(cudnn_forms, "check", lambda *_, **__: None)
    x, norm = channels_last(random_map((2, 8, 10, 9), HALF)), norm_for(8)
    operand = Operand.normalized(x, join_moments(moments(x), norm, halves=True))
    weight = channels_last(torch.randn(16, 8, 1, 1).half())
    for name in ("cudnn engine4", "cudnn statistics engine2"):
        assert list(cudnn_forms.forward(operand, weight, 1, False, name)) == [name]
    assert built == ["engine4", "engine2"]
    names = list(cudnn_forms.forward(operand, weight, 1, False))
    assert len(names) == 12
    assert names[0] == "cudnn statistics engine0"
    with pytest.raises(CudnnError, match="no engine takes it"):
        cudnn_forms.forward(operand, weight, 1, False, "cudnn engine9")
    # cuDNN takes the graph that stores relu(norm(x)), and does not store it.
    assert not any(
        name.startswith("cudnn engine") for name in cudnn_forms.forward(operand, weight, 1, True)
    )
    with pytest.raises(AssertionError):
        cudnn_forms.input_gradient(x, weight, Epilogue.plain(x), 1)
