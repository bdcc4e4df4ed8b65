"""A step of an optimizer as a CUDA graph, for the tests on a GPU."""

from __future__ import annotations

import torch

from paceline.optim import LARS


def recorded(optimizer: LARS) -> torch.cuda.CUDAGraph:
    """Prepared and captured on a stream of its own; the gradients are there, and stay where they are."""
    optimizer.prepare()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
