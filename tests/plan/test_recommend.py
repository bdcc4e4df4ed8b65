"""Memory, recommended batches, prices, input and the table of nodes and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.optim.scaling import Recipe, Target, scale_recipe
from paceline.optim.settings import OptimSettings
from paceline.plan.noise import useful_batch
from paceline.planner.accelerators import accelerator, catalogue, gpu_cluster
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import Question
from paceline.planner.layers import network
from paceline.planner.memory import (
    check_memory,
    largest_batch,
    memory_on,
    step_memory,
    usable_bytes,
)
from paceline.planner.recommend import (
    Job,
    Limits,
    candidate_batches,
    choose,
    largest_global_batch,
    limits_of,
    options,
    recommended_batch,
)
from paceline.planner.start_up import PROCESS_S

H100 = accelerator("H100")
NET = network("resnet50")
ASK = Question(analytic_workload(NET, H100), 64, ("native",))
PLACE = gpu_cluster(H100, 4, 8, 3200, links=8)
JOB = Job(90, 1_281_167, H100.watts, 2.0)

# Model, batch, half precision, CUDA graphs, GiB: torch.cuda.max_memory_allocated of our step on one H200
# (records/training-step; alexnet_bn: records/first-convolutions; fp32: TF32,
# after the trials, records/planner).
PEAKS = [
    ("resnet50", 256, True, True, 10.55),
    ("resnet50", 256, True, False, 10.45),
    ("resnet50", 512, True, True, 20.66),
    ("alexnet_bn", 512, True, True, 2.27),
    ("resnet50", 8, False, True, 1.09),
    ("resnet50", 128, False, True, 10.44),
    ("resnet50", 512, False, True, 40.42),
]


@pytest.mark.parametrize(("model", "batch", "half", "graphs", "gib"), PEAKS)
def test_measured_peaks_are_met(
    model: str, batch: int, half: bool, graphs: bool, gib: float
) -> None:
    found = step_memory(network(model), batch, half, graphs)
    assert found.total / 2**30 == pytest.approx(gib, rel=0.03)


def test_windows_are_kept_in_place_of_images() -> None:
    """Both exist until the end of the forward pass, which is the peak of large batches."""
    net = network("alexnet_bn")
    kept = 64 * 57**2
    assert net.layers[0].windows == kept
    for batch, beside in ((8, False), (4096, True)):
        with_windows = step_memory(net, batch)
        as_they_are = replace(net.layers[0], windows=0.0)
        plain = step_memory(replace(net, layers=(as_they_are, *net.layers[1:])), batch)
        more = with_windows.images - plain.images
        assert more == 2 * batch * (kept - 4 * 224**2)
        if beside:
            assert with_windows.gradients == 2 * net.elements  # backward has made none
            peak = sum(layer.kept_bytes(2, fused=True) for layer in net.layers) + 8 * 224**2
            assert with_windows.activations == batch * peak
        else:
            assert with_windows.total - plain.total == more
    unfused = step_memory(net, 64, fused=False)
    assert unfused.images == 64 * 224**2 * (4 * 3 + 3 * 2)


@pytest.mark.parametrize("name", ["resnet50", "resnet101"])
def test_recomputed_norms_need_a_fifth_less_and_take_longer(name: str) -> None:
    stored, again = network(name), network(name).recomputing_norms()
    assert step_memory(again, 256).total < 0.8 * step_memory(stored, 256).total
    assert largest_batch(again, H100) > 1.25 * largest_batch(stored, H100)
    before, after = (analytic_workload(net, H100) for net in (stored, again))
    assert 1.02 < after.compute_s(256) / before.compute_s(256) < 1.15
    assert after.forward == before.forward
    assert stored.can_recompute_norms
    assert not network("alexnet").can_recompute_norms


def test_small_batches_need_what_no_batch_changes() -> None:
    """At batch 1, the peak is in the backward pass, with the classifier's gradients and the flat ones."""
    net = network("alexnet_bn")
    one, two = (step_memory(net, batch) for batch in (1, 2))
    last_layers = sum(t.elements for t in net.tensors if t.name.startswith("classifier"))
    assert one.gradients >= 2 * (net.elements + last_layers)
    assert one.libraries == two.libraries > 0
    assert step_memory(net, 1, graphs=False).graph == 0 < one.graph < two.graph
    shares = [
        step_memory(NET, batch).activations / step_memory(NET, batch).total for batch in (8, 512)
    ]
    assert shares[0] < 0.5 < 0.9 < shares[1]


@pytest.mark.parametrize("name", list(catalogue()))
def test_the_largest_batch_is_the_largest(name: str) -> None:
    gpu = accelerator(name)
    most = largest_batch(NET, gpu)
    fits, exceeds = (memory_on(gpu, NET, batch).total for batch in (most, most + 1))
    assert fits <= usable_bytes(gpu) < exceeds
    assert check_memory(NET, gpu, most).total <= gpu.memory_bytes
    again = largest_batch(NET.recomputing_norms(), gpu)
    for net, hint in ((NET, f"{most:,} fit; with run.accel.recompute_norms, {again:,}"),
                      (NET.recomputing_norms(), f"{again:,} fit")):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check_memory(net, gpu, again + 1)
        assert str(caught.value).endswith(f"; at most {hint}")


def test_chips_without_triton_keep_the_maps_before_pools() -> None:
    net = network("resnet18")
    for name in ("P40", "P100", "CPU"):
        gpu = accelerator(name)
        assert memory_on(gpu, net, 64) == step_memory(
            net, 64, half=gpu.is_gpu, fused=False, on_gpu=gpu.is_gpu
        )
        assert largest_batch(net, gpu) < largest_batch(net, replace(gpu, compute_capability=7.0))
    for name in ("V100", "A100", "H100"):
        gpu = accelerator(name)
        assert memory_on(gpu, net, 64) == step_memory(net, 64)
        # As with run.accel.fused_norm = "off".
        assert largest_batch(net, gpu, fused=False) < largest_batch(net, gpu)
        assert memory_on(gpu, net, 64, fused=False) == step_memory(net, 64, fused=False)
    stem, pooled = 64 * 112**2, 64 * 56**2
    fused, unfused = (step_memory(net, 64, fused=is_fused) for is_fused in (True, False))
    assert unfused.activations - fused.activations == 64 * (2 * stem + 7 * pooled)
    assert fused.images - unfused.images == 64 * 2 * 224**2


def test_a_cpu_has_no_buffers_of_cuda() -> None:
    found = memory_on(accelerator("CPU"), NET, 8)
    assert found.libraries == found.graph == 0
    assert memory_on(accelerator("P40"), NET, 8).libraries > 0


def test_a_model_that_does_not_fit_at_all() -> None:
    tiny = replace(H100, memory_gb=2.2)
    assert largest_batch(NET, tiny) == 0
    with pytest.raises(ConfigError, match="more memory"):
        check_memory(NET, tiny, 1)
    with pytest.raises(ConfigError, match="--model"):
        recommended_batch(ASK, PLACE, Limits(memory_batch=0))


def test_the_recommended_batch_is_the_smallest_that_is_nearly_as_fast() -> None:
    limits = Limits(largest_batch(NET, H100))
    batch = recommended_batch(ASK, PLACE, limits)
    most = limits.largest(PLACE.ranks)
    speed = {
        size: replace(ASK, batch=size).answer(PLACE).images_per_s
        for size in candidate_batches(most)
    }
    best = max(speed.values())
    assert speed[batch] >= 0.97 * best
    assert all(fast < 0.97 * best for size, fast in speed.items() if size < batch)


def test_limits_hold() -> None:
    assert recommended_batch(ASK, PLACE, Limits(memory_batch=50)) <= 50
    assert recommended_batch(ASK, PLACE, Limits(global_batch=640)) <= 20
    with pytest.raises(ConfigError, match="--nodes"):
        recommended_batch(ASK, PLACE, Limits(global_batch=31))
    assert candidate_batches(5) == [5]
    assert candidate_batches(32) == [8, 12, 16, 24, 32]


def test_a_noise_scale_lowers_the_largest_batch() -> None:
    found = largest_global_batch(None, 1000.0, *IMAGENET)
    assert found.images == int(useful_batch(1000.0)) < 65_536
    assert "noise scale of 1000" in found.why
    for noise in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="--noise-scale"):
            largest_global_batch(None, noise, *IMAGENET)
    # It does not lift the limits of accuracy, nor the one that is given.
    assert largest_global_batch(None, 1e6, *IMAGENET) == largest_global_batch(None, 0.0, *IMAGENET)
    assert largest_global_batch(None, 1e6, 50_000, 30).images == 16_666
    assert largest_global_batch(3200, 1000.0, *IMAGENET) == largest_global_batch(
        3200, 0.0, *IMAGENET
    )
    assert largest_global_batch(8000, 1000.0, *IMAGENET).images == int(useful_batch(1000.0))
    tiny = largest_global_batch(None, 1e-4, *IMAGENET)
    with pytest.raises(ConfigError, match="--noise-scale = 0.0001") as caught:
        recommended_batch(ASK, PLACE, limits_of(None, None, tiny))
    assert caught.value.remedy == "use fewer GPUs, or leave out --noise-scale"


IMAGENET = (1_281_167, 90.0)


@pytest.mark.parametrize(
    ("samples", "epochs", "most", "set_by"),
    [
        (*IMAGENET, 65_536, None),
        (50_000, 30.0, 16_666, "--epochs"),
        (50_000, 90.0, 25_000, "--dataset-size"),
        (1_281_167, 1.0, 14_235, "--epochs"),
        (1, 1e-300, 1, "--epochs"),
    ],
)
def test_the_largest_batch_is_in_the_range_of_the_large_batch_rule(
    samples: int, epochs: float, most: int, set_by: str | None
) -> None:
    found = largest_global_batch(None, 0.0, samples, epochs)
    assert found.images == most
    assert (found.set_by and found.set_by[0]) == set_by
    assert ("large-batch rule" in found.why) == (most != 65_536)
    if epochs >= 1:  # a batch that was not measured is not recommended
        target = Target(batch=most, samples=samples, epochs=int(epochs))
        recipe = Recipe(OptimSettings(name="sgd", lr=0.1), 256, "sgd", norm_group=1)
        assert "not measured" not in "".join(scale_recipe(recipe, target).notes)
        if set_by:
            wider = replace(target, batch=most + most // 50)
            assert "not measured" in scale_recipe(recipe, wider).notes[-1]


def test_a_limit_as_given_holds_unless_an_epoch_is_smaller() -> None:
    assert largest_global_batch(3200, 0.0, *IMAGENET).images == 3200
    assert largest_global_batch(3200, 0.0, 50_000, 1.0).images == 3200
    small = largest_global_batch(3200, 0.0, 1000, 1.0)
    assert (small.images, small.why) == (1000, "the images of an epoch")
    with pytest.raises(ConfigError, match="--max-global-batch"):
        largest_global_batch(0, 0.0, *IMAGENET)


def test_a_slow_input_does_not_change_the_recommended_batch() -> None:
    """A slow input makes all batches equally slow, so the smallest would be chosen, which is wrong for a
    faster input."""
    slow = replace(ASK, workload=ASK.workload.fed_at(100.0))
    assert recommended_batch(slow, PLACE, Limits()) == recommended_batch(ASK, PLACE, Limits()) > 8


def test_the_table_keeps_the_limits_and_counts_hours() -> None:
    limits = Limits(memory_batch=200, global_batch=10_000, price=2.0)
    found = options(replace(ASK, batch=100), PLACE, limits, JOB)
    assert {option.nodes for option in found} == {1, 2, 4, 8, 16}
    for option in found:
        assert option.batch <= 200
        assert option.global_batch <= 10_000
        assert option.total_s == pytest.approx(option.startup_s + option.train_s)
        assert option.gpu_hours == pytest.approx(option.ranks * option.total_s / 3600)
        assert option.cost == pytest.approx(2 * option.gpu_hours)
        assert option.energy_kwh == pytest.approx(0.7 * option.gpu_hours)


def test_start_up_counts_and_is_short_without_nccl() -> None:
    found = ASK.answer(PLACE)
    nccl, gloo = (replace(JOB, nccl=is_nccl).option(found, 4) for is_nccl in (True, False))
    assert nccl.train_s == gloo.train_s
    assert nccl.startup_s > 1 + gloo.startup_s > gloo.startup_s > PROCESS_S
    given = replace(JOB, startup_s=7.0).option(found, 4)
    assert given.startup_s == 7
    assert given.total_s == 7 + given.train_s
    assert nccl.cost > gloo.cost
    minutes = (nccl.train_s + (nccl.startup_s + gloo.startup_s) / 2) / 60
    assert not nccl.within(Limits(minutes=minutes))
    assert gloo.within(Limits(minutes=minutes))


def test_a_time_takes_the_cheapest_and_a_budget_the_fastest() -> None:
    found = options(replace(ASK, batch=128), PLACE, Limits(price=2.0), JOB)
    slowest = max(option.train_s for option in found)
    in_time = Limits(minutes=slowest / 120, price=2.0)
    chosen = choose(found, in_time)
    assert chosen.train_s <= slowest / 2
    assert all(chosen.gpu_hours <= o.gpu_hours for o in found if o.within(in_time))
    budget = Limits(budget=sorted(option.cost for option in found)[3], price=2.0)
    fast = choose(found, budget)
    assert fast.cost <= budget.budget
    assert all(fast.train_s <= o.train_s for o in found if o.within(budget))
    assert choose(found, Limits(minutes=1e-3)) is None


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"minutes": -1.0}, "--target-minutes"),
        ({"budget": 5.0}, "--budget"),
        ({"price": float("nan")}, "--price-per-gpu-hour"),
        ({"price": 1e308}, "--price-per-gpu-hour"),
        ({"global_batch": 0}, "--max-global-batch"),
    ],
)
def test_limits_that_cannot_be(values: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Limits(**values)  # type: ignore[arg-type]
