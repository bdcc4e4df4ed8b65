"""The backend's own all-reduce, asynchronous: here over Gloo, which knows it too."""

from __future__ import annotations

import torch
from torch import Tensor

from comm.exchanges import joined
from paceline.comm.carrier import Piece
from paceline.comm.native_carrier import NativeCarrier
from paceline.comm.process_groups import ProcessGroups
from ranks import run_ranks


def _sums(rank: int) -> tuple[list[Tensor], list[str]]:
    with joined() as group:
        carrier = NativeCarrier(group, ProcessGroups(group.topology, timeout_s=20, subgroups=False))
        tensors = [torch.full((5,), rank + 1 / 3), torch.full((4,), rank + 1 / 3), torch.zeros(0)]
        log: list[str] = []

        def send(*pieces: Piece) -> None:
            number = len(waits)
            begun, ended = f"begun {number}", f"ended {number}"
            waits.append(carrier.send(pieces, lambda: log.append(begun), lambda: log.append(ended)))

        for _ in range(2):  # the memory of a wire format serves again
            waits: list[object] = []
            log.clear()
            send(Piece(tensors[0], "native", "auto"))
            send(Piece(tensors[1], "native", "float16"), Piece(tensors[2], "native", "float16"))
            for wait in waits:
                wait()  # type: ignore[operator]
        carrier.close()
        return tensors, log


def test_messages_under_way_at_once_are_summed_each_in_its_format() -> None:
    for (full, half, empty), log in run_ranks(2, _sums):
        torch.testing.assert_close(full, torch.full((5,), 10 / 3))
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, torch.full((4,), 10 / 3), rtol=1e-3, atol=0)
        assert not torch.equal(half, full[:4]), "it did not travel in fp16"
        assert empty.numel() == 0
        assert log == ["begun 0", "begun 1", "ended 0", "ended 1"]
