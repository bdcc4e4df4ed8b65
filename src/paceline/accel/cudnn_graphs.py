"""Computes a convolution in half precision and the operations around it as one kernel of cuDNN.

The module calls the C interface of cuDNN's graph API by ctypes, in the library that torch has
loaded, because NVIDIA's Python package has no node for the gradients of γ and β. A `Graph` is plain
data; `plans` returns cuDNN's kernels for a graph, in the order of cuDNN's heuristics. Activations
are in channels-last memory and fp16, with a multiple of 8 channels; vectors have one value per
channel. The numbers of descriptors, attributes and types are defined in cuDNN's header
`cudnn_graph.h` and are equal in all versions 9.x.

cuDNN sums statistics and gradients of γ and β in no fixed order, so repetitions agree only within
rounding.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Types of attributes in `cudnnBackendSetAttribute`.
_HANDLE, _DATA_TYPE, _BOOLEAN, _INT64, _FLOAT32, _DOUBLE, _POINTER = range(7)
_CONVOLUTION_MODE, _HEURISTICS = 7, 8
_KNOB, _POINTWISE_MODE, _DESCRIPTOR, _STATISTICS_MODE = 9, 14, 15, 16
_FLOAT, _HALF = 0, 2
_CROSS_CORRELATION, _MODE_A = 1, 3
_POINTWISE = {"add": 0, "mul": 1, "sub": 9, "relu": 100, "relu_backward": 200}
# By kind of convolution: the type of the descriptor, its first attribute (α), and the attributes of
# the two inputs and the output, in the order of `Node`.
_CONVOLUTIONS = {
    "forward": (10, 700, (704, 703, 705)),
    "input": (12, 706, (711, 709, 710)),
    "weight": (11, 712, (716, 717, 715)),
}
_KNOBS = 32
# The alignment of every tensor in bytes.
ALIGNMENT = 16
_NAME, _OLDEST = "libcudnn.so.9", 90000
_FUNCTIONS: dict[str, list[Any]] = {
    "cudnnCreate": [c_void_p],
    "cudnnSetStream": [c_void_p, c_void_p],
    "cudnnBackendCreateDescriptor": [c_int, c_void_p],
    "cudnnBackendDestroyDescriptor": [c_void_p],
    "cudnnBackendSetAttribute": [c_void_p, c_int, c_int, c_int64, c_void_p],
    "cudnnBackendGetAttribute": [c_void_p, c_int, c_int, c_int64, c_void_p, c_void_p],
    "cudnnBackendFinalize": [c_void_p],
    "cudnnBackendExecute": [c_void_p, c_void_p, c_void_p],
    "cudnnGetLastErrorString": [ctypes.c_char_p, c_size_t],
    "cudnnGetErrorString": [c_int],
    "cudnnGetVersion": [],
}


class CudnnError(RuntimeError):
    """Raised if cuDNN is missing or reports an error; the message has one line."""


@dataclass(frozen=True)
class Value:
    """A tensor of a graph. A tensor without a name is in fp32 and is not stored in memory."""

    uid: int
    name: str
    dims: tuple[int, ...]
    half: bool


@dataclass(frozen=True)
class Node:
    """An operation of a graph; `stride` is used by convolutions only.

    `operation` is a key of `_POINTWISE` or `_CONVOLUTIONS`, or `statistics` or `norm_weights`.
    """

    operation: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    stride: int = 1


@dataclass
class Graph:
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def map(self, name: str, dims: Sequence[int]) -> Value:
        return self._value(name, tuple(dims), half=bool(name))

    def vector(self, name: str, channels: int, *, half: bool = False) -> Value:
        return self._value(name, (1, channels, 1, 1), half)

    def _value(self, name: str, dims: tuple[int, ...], half: bool) -> Value:
        value = Value(len(self.values) + 1, name, dims, half)
        self.values.append(value)
        return value

    def pointwise(self, operation: str, *inputs: Value, name: str = "") -> Value:
        """Adds an elementwise operation and returns its output, which is stored if `name` is given.

        The first input is an activation; a second one is an activation or a vector. The inputs of
        `relu_backward` are the gradient and the input of the ReLU.
        """
        out = self.map(name, inputs[0].dims)
        self.nodes.append(Node(operation, inputs, (out,)))
        return out

    def convolution(self, kind: str, first: Value, second: Value, out: Value, stride: int) -> None:
        """Adds a convolution or a gradient of one; the padding is half the kernel size.

        The inputs `first` and `second` depend on `kind`. `forward`: the activation and the weight.
        `input`: the gradient of the output and the weight. `weight`: the activation and the
        gradient of the output.
        """
        self.nodes.append(Node(kind, (first, second), (out,), stride))

    def statistics(self, x: Value, total: Value, squares: Value) -> None:
        """Adds the sum of `x` and the sum of its squares for each channel, as two vectors."""
        self.nodes.append(Node("statistics", (x,), (total, squares)))

    def norm_weights(
        self, norm: tuple[Value, Value, Value], x: Value, dz: Value, found: Sequence[Value]
    ) -> None:
        """Adds the gradients of a norm's γ and β, and the factors of the gradient of its input.

        Args:
            norm: The mean, 1/σ and γ of the norm.
            x: The input of the norm.
            dz: The gradient of the output of the norm.
            found: The five outputs, in the order of the rows that `fused.join_sums` returns.
        """
        self.nodes.append(Node("norm_weights", (*norm, x, dz), tuple(found)))

    def work(self) -> tuple[str, int]:
        """Returns the kind of the convolution, and its FLOPs (two for a multiply-add)."""
        (node,) = (each for each in self.nodes if each.operation in _CONVOLUTIONS)
        first, second, (result,) = *node.inputs, node.outputs
        behind, weight = {
            "forward": (result, second), "input": (first, second), "weight": (second, result),
        }[node.operation]  # fmt: skip
        return node.operation, 2 * math.prod(behind.dims) * math.prod(weight.dims[1:])


class _Library:
    """The C interface of cuDNN; a call that fails raises `CudnnError`."""

    def __init__(self) -> None:
        expected = _torch_version()
        try:
            self._c = ctypes.CDLL(_NAME)
        except OSError as error:
            raise CudnnError(f"{_NAME} cannot be loaded ({_one_line(str(error))})") from error
        for name, types in _FUNCTIONS.items():
            try:
                getattr(self._c, name).argtypes = types
            except AttributeError as error:
                raise CudnnError(f"{_NAME} has no {name}") from error
        self._c.cudnnGetErrorString.restype = ctypes.c_char_p
        self._c.cudnnGetLastErrorString.restype = None
        self._c.cudnnGetVersion.restype = c_size_t
        self.version: int = self._c.cudnnGetVersion()
        if self.version != expected:
            raise CudnnError(f"{_NAME} has version {self.version}, and torch uses {expected}")
        self.destroy = self._c.cudnnBackendDestroyDescriptor
        # Held while a handle's stream is set and used, because only one thread may use a handle at
        # a time.
        self.lock = threading.Lock()
        self._handles: dict[int, c_void_p] = {}

    def call(self, name: str, *given: Any) -> None:
        status = getattr(self._c, name)(*given)
        if status:
            reason = ctypes.create_string_buffer(512)
            self._c.cudnnGetLastErrorString(reason, len(reason))
            text = _one_line(reason.value.decode(errors="replace"))
            raise CudnnError(f"{self._c.cudnnGetErrorString(status).decode()}: {text}")

    def handle(self, device: torch.device) -> c_void_p:
        """Returns the cuDNN handle of `device`, on which kernels run in torch's current CUDA stream.

        `device` must be torch's current device.
        """
        index = torch.cuda.current_device()
        assert device.index in (None, index), device
        if index not in self._handles:
            made = c_void_p()
            self.call("cudnnCreate", ctypes.byref(made))
            self._handles[index] = made
        stream = torch.cuda.current_stream().cuda_stream
        self.call("cudnnSetStream", self._handles[index], c_void_p(stream))
        return self._handles[index]


def _torch_version() -> int:
    """Returns the version number of the cuDNN library that torch has loaded."""
    try:
        version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise CudnnError(_one_line(str(error))) from error
    if version is None:
        raise CudnnError("this build of torch has no cuDNN")
    if version < _OLDEST:
        raise CudnnError(f"torch has cuDNN {version}, older than {_OLDEST}")
    return version


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


@functools.cache
def _library() -> _Library:
    return _Library()


def version() -> int:
    """Returns the version number of cuDNN. Raises `CudnnError` if cuDNN cannot be used."""
    return _library().version


class _Descriptor:
    """A descriptor of cuDNN's C interface; it keeps alive the descriptors passed to `refer`."""

    def __init__(self, kind: int) -> None:
        self.at = c_void_p()
        self.kept: list[_Descriptor] = []
        library = _library()
        self._destroy = library.destroy
        library.call("cudnnBackendCreateDescriptor", c_int(kind), ctypes.byref(self.at))

    def __del__(self) -> None:
        if self.at.value:
            self._destroy(self.at)

    def set(self, attribute: int, kind: int, array: Any) -> None:
        _library().call(
            "cudnnBackendSetAttribute", self.at, c_int(attribute), c_int(kind), c_int64(len(array)),
            array,
        )  # fmt: skip

    def integers(self, attribute: int, values: Sequence[int]) -> None:
        self.set(attribute, _INT64, (c_int64 * len(values))(*values))

    def number(self, attribute: int, kind: int, value: int) -> None:
        self.set(attribute, kind, (c_int * 1)(value))

    def refer(self, attribute: int, *others: _Descriptor) -> None:
        self.kept += others
        array = (c_void_p * len(others))(*[other.at.value for other in others])
        self.set(attribute, _DESCRIPTOR, array)

    def get(self, attribute: int, kind: int, array: Any) -> int:
        """Reads an attribute into `array`, and returns how many elements it has."""
        count = c_int64()
        _library().call(
            "cudnnBackendGetAttribute", self.at, c_int(attribute), c_int(kind), c_int64(len(array)),
            ctypes.byref(count), array if len(array) else None,
        )  # fmt: skip
        return count.value

    def finish(self) -> _Descriptor:
        _library().call("cudnnBackendFinalize", self.at)
        return self


def _tensor(value: Value) -> _Descriptor:
    made = _Descriptor(17)
    _, channels, height, width = value.dims
    made.number(901, _DATA_TYPE, _HALF if value.half else _FLOAT)
    made.integers(902, value.dims)
    made.integers(903, (channels * height * width, 1, channels * width, channels))
    made.integers(906, (value.uid,))
    made.integers(900, (ALIGNMENT,))
    made.set(907, _BOOLEAN, (c_bool * 1)(not value.name))
    return made.finish()


def _pointwise(node: Node, tensors: Mapping[Value, _Descriptor]) -> _Descriptor:
    inner, made = _Descriptor(0), _Descriptor(13)
    inner.number(0, _POINTWISE_MODE, _POINTWISE[node.operation])
    inner.number(1, _DATA_TYPE, _FLOAT)
    if node.operation.startswith("relu"):
        inner.set(3, _DOUBLE, (c_double * 1)(0.0))
    made.refer(750, inner.finish())
    places = (757, 751) if node.operation == "relu_backward" else (751, 752)
    for place, value in zip(places, node.inputs, strict=False):
        made.refer(place, tensors[value])
    made.refer(756 if node.operation == "relu_backward" else 753, tensors[node.outputs[0]])
    return made.finish()


def _convolution(node: Node, tensors: Mapping[Value, _Descriptor]) -> _Descriptor:
    kind, first, places = _CONVOLUTIONS[node.operation]
    values = (*node.inputs, *node.outputs)
    weight = values[2] if node.operation == "weight" else values[1]
    inner, made = _Descriptor(1), _Descriptor(kind)
    inner.number(100, _DATA_TYPE, _FLOAT)
    inner.number(101, _CONVOLUTION_MODE, _CROSS_CORRELATION)
    inner.integers(106, (2,))
    padding = [size // 2 for size in weight.dims[2:]]
    for place, pair in ((102, (1, 1)), (103, (node.stride,) * 2), (104, padding), (105, padding)):
        inner.integers(place, pair)
    # α and β. They must be float32, because kernels of single convolutions take float64 values for
    # 0.
    made.set(first, _FLOAT32, (c_float * 1)(1.0))
    made.set(first + 1, _FLOAT32, (c_float * 1)(0.0))
    made.refer(first + 2, inner.finish())
    for place, value in zip(places, values, strict=True):
        made.refer(place, tensors[value])
    return made.finish()


def _sums(node: Node, tensors: Mapping[Value, _Descriptor]) -> _Descriptor:
    statistics = node.operation == "statistics"
    made = _Descriptor(14 if statistics else 23)
    first = 771 if statistics else 1620
    if statistics:
        made.number(770, _STATISTICS_MODE, 0)
    made.number(first, _DATA_TYPE, _FLOAT)
    for place, value in enumerate((*node.inputs, *node.outputs), first + 1):
        made.refer(place, tensors[value])
    return made.finish()


def _lowered(graph: Graph, device: torch.device) -> _Descriptor:
    tensors = {value: _tensor(value) for value in graph.values}
    operations = []
    for node in graph.nodes:
        lower = (
            _pointwise if node.operation in _POINTWISE
            else _convolution if node.operation in _CONVOLUTIONS
            else _sums
        )  # fmt: skip
        operations.append(lower(node, tensors))
    made = _Descriptor(15)
    made.refer(801, *operations)
    made.set(800, _HANDLE, (c_void_p * 1)(_library().handle(device).value))
    return made.finish()


class Plan:
    """A kernel of cuDNN that computes a graph."""

    def __init__(self, graph: Graph, config: _Descriptor, device: torch.device) -> None:
        self.graph, self._device = graph, device
        # The plan keeps cuDNN's descriptors of its config, heuristics, graph and tensors alive.
        self._stored = [value for value in graph.values if value.name]
        self._plan = _Descriptor(5)
        self._plan.refer(401, config)
        self._plan.set(400, _HANDLE, (c_void_p * 1)(_library().handle(device).value))
        self._plan.finish()
        size = (c_int64 * 1)()
        self._plan.get(402, _INT64, size)
        self._workspace = size[0]

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Runs the kernel on torch's current stream; CUDA graphs can capture the call.

        `tensors` has the inputs and outputs by their names in the graph.
        """
        for value in self._stored:
            _check(value, tensors[value.name])
        # The workspace is freed on this stream, so only work that is queued later can reuse its
        # memory.
        space = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        pack, count = _Descriptor(16), len(self._stored)
        pack.integers(1000, [value.uid for value in self._stored])
        places = [tensors[value.name].data_ptr() for value in self._stored]
        pack.set(1001, _POINTER, (c_void_p * count)(*places))
        pack.set(1003, _POINTER, (c_void_p * 1)(space.data_ptr()))
        pack.finish()
        library = _library()
        with library.lock:
            handle = library.handle(self._device)
            library.call("cudnnBackendExecute", handle, self._plan.at, pack.at)


def _check(value: Value, tensor: Tensor) -> None:
    """Asserts type, shape and layout of a tensor, because cuDNN receives only the address."""
    assert tensor.dtype == (torch.float16 if value.half else torch.float32), value
    assert tensor.data_ptr() % ALIGNMENT == 0, value
    if value.dims[2:] == (1, 1) and tensor.dim() == 1:
        assert (1, len(tensor), 1, 1) == value.dims, value
        assert tensor.is_contiguous(), value
    else:
        assert tuple(tensor.shape) == value.dims, value
        assert tensor.is_contiguous(memory_format=torch.channels_last), value


def _name(config: _Descriptor) -> str:
    """Returns a name for a kernel of cuDNN, made of its engine number and settings.

    The name is equal in all processes with the same version of cuDNN.
    """
    engine, index = _Descriptor(2), (c_int64 * 1)()
    config.get(300, _DESCRIPTOR, (c_void_p * 1)(engine.at.value))
    engine.get(1301, _INT64, index)
    knobs = [_Descriptor(7) for _ in range(_KNOBS)]
    count = config.get(302, _DESCRIPTOR, (c_void_p * _KNOBS)(*[knob.at.value for knob in knobs]))
    words = [f"engine{index[0]}"]
    for knob in knobs[:count]:
        kind, value = (c_int * 1)(), (c_int64 * 1)()
        knob.get(600, _KNOB, kind)
        knob.get(601, _INT64, value)
        words.append(f"{kind[0]}={value[0]}")
    return ",".join(words)


def plans(graph: Graph, device: torch.device, most: int, only: str = "") -> dict[str, Plan]:
    """Builds at most `most` kernels in the order of cuDNN's heuristics, or only the one called `only`.

    Raises:
        CudnnError: If cuDNN has no such kernel.
    """
    operations = _lowered(graph, device)
    heuristics = _Descriptor(4)
    heuristics.refer(201, operations)
    heuristics.number(200, _HEURISTICS, _MODE_A)
    heuristics.finish()
    found = [_Descriptor(3) for _ in range(heuristics.get(202, _DESCRIPTOR, ()))]
    array = (c_void_p * len(found))(*[config.at.value for config in found])
    count = heuristics.get(202, _DESCRIPTOR, array) if found else 0
    made: dict[str, Plan] = {}
    refused: CudnnError | None = None
    for config in found[:count]:
        config.kept.append(heuristics)
        try:
            name = _name(config)
            if name not in made and only in ("", name):
                made[name] = Plan(graph, config, device)
        except CudnnError as error:
            refused = refused or error
        if len(made) == (1 if only else most):
            break
    if not made:
        raise CudnnError(f"cuDNN has no kernel for this graph ({refused or 'no engine takes it'})")
    return made
