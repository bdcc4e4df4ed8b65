"""Sums gradients in 8-bit wire formats with error feedback.

No backend sums 8-bit numbers, and a sum of them would need more bits. Therefore each rank owns a chunk of
the buffer. The owner receives this chunk from every rank in 8 bits (all-to-all), adds the chunks in fp32,
quantizes the sum and sends it to all ranks (all-gather). All ranks decode the same bytes, so their
results are bit-identical.

Error feedback: a rank adds its residuals, which are the differences between its gradients and their
quantized values, to the gradients of the next step (Seide et al. 2014, Karimireddy et al. 2019). The
owner of a chunk does the same with the residuals of its sum (Tang et al. 2019). The residuals are in
units of the unscaled gradient, so that the loss scale may change between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.alternatives.eight_bit.wires import BLOCK, SCALE_BYTES, EightBitSettings
from paceline.comm.collectives import all_gather_flat
from paceline.comm.executor import Staging
from paceline.comm.memory import Memory
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import CommSettings
from paceline.core.errors import CheckpointError


@dataclass(frozen=True)
class BlockFormat:
    """An 8-bit format with one fp32 scale per block of `BLOCK` elements.

    The scale maps the largest magnitude in a block to the largest value of the dtype. Packed data consist
    of all scales, followed by all 8-bit elements.

    Attributes:
        dtype: dtype of the 8-bit elements.
        largest: Largest value of the dtype.
    """

    dtype: torch.dtype
    largest: float

    def packed_bytes(self, length: int) -> int:
        """Returns the size in bytes of `length` quantized elements; `length` is a multiple of `BLOCK`."""
        return length + length // BLOCK * SCALE_BYTES

    def encode(self, values: Tensor, packed: Tensor) -> None:
        """Quantizes whole blocks of fp32 `values` and writes the bytes to `packed`.

        A block with a non-finite number decodes to NaN, so that every rank skips the step.
        """
        rows = values.view(-1, BLOCK)
        scales, numbers = self._parts(packed)
        scales.copy_(rows.abs().amax(dim=1).div_(self.largest))
        # A block of zeros or of values too small for a scale: the residual keeps the values.
        divisor = torch.where(scales == 0, 1.0, scales)
        scaled = rows / divisor[:, None]
        if self.dtype == torch.int8:
            # An infinite scale gives NaN, which has no integer value.
            scaled = scaled.nan_to_num_(0.0).round_()
        numbers.copy_(scaled.clamp_(-self.largest, self.largest))

    def decode(self, packed: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Decodes `packed` to fp32 and writes the values to `out`, or adds them if `add` is set."""
        scales, numbers = self._parts(packed)
        rows, wide = out.view(-1, BLOCK), numbers.float()
        if add:
            rows.addcmul_(wide, scales[:, None])
        else:
            torch.mul(wide, scales[:, None], out=rows)

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        blocks = packed.numel() // (BLOCK + SCALE_BYTES)
        cut = blocks * SCALE_BYTES
        return packed[:cut].view(torch.float32), packed[cut:].view(self.dtype).view(blocks, -1)


FORMATS = {
    "int8": BlockFormat(torch.int8, 127.0),
    "float8_e4m3": BlockFormat(torch.float8_e4m3fn, 448.0),
    "float8_e5m2": BlockFormat(torch.float8_e5m2, 57344.0),
}


class Residuals(Memory):
    """The residuals of quantization (error feedback) of this rank's gradients and chunk of the sums.

    A step adds the residuals `kept` to its gradients and writes new ones to `fresh`. `commit` then
    copies `fresh` to `kept`, unless the step is skipped.
    """

    kind = "residuals"

    def __init__(self) -> None:
        super().__init__()
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._saved: Tensor | None = None

    def pair(self, buffer: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns the residuals `kept` and `fresh` of the message in `buffer`, of `length` each.

        Messages have a fixed order, so a checkpoint needs no names for them.
        """
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._pairs:
            kept = torch.zeros(length, device=buffer.device)
            if self._saved is not None:
                if len(self._saved) < length:
                    raise CheckpointError(
                        "the rounding errors of the 8-bit wire in the checkpoint have another size",
                        "resume with the settings of [comm] in the checkpoint",
                    )
                kept.copy_(self._saved[:length])
                self._saved = self._saved[length:]
            self._pairs[key] = (kept, torch.zeros_like(kept))
        return self._pairs[key]

    def commit(self, discard: Tensor) -> None:
        """Keeps the residuals of this step for the next, unless the device tensor `discard` is set."""
        for kept, fresh in self._pairs.values():
            torch.where(discard > 0, kept, fresh, out=kept)

    def state(self) -> dict[str, Any]:
        """Returns this rank's residuals for a checkpoint."""
        kept = [kept.cpu() for kept, _ in self._pairs.values()]
        if self._saved is not None:  # messages that were not sent since a checkpoint was loaded
            kept.append(self._saved)
        return {"kept": torch.cat(kept) if kept else torch.zeros(0)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads residuals that the same rank has saved, for messages of the same sizes."""
        kept = saved.get("kept")
        if not isinstance(kept, Tensor) or kept.dim() != 1:
            raise CheckpointError(
                "the saved 8-bit residuals are not a list of numbers", "use another checkpoint"
            )
        self._saved, self._pairs = kept.float(), {}

    @property
    def state_bytes(self) -> int:
        """Size of the residuals in device memory, in bytes."""
        return sum(kept.nbytes + fresh.nbytes for kept, fresh in self._pairs.values())


class QuantizedAllReduce:
    """Sums buffers over ranks in 8-bit formats.

    Every rank calls `run` with the same buffers in the same order. Error feedback needs `settings`.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging,
        settings: CommSettings | None,
        wires: Sequence[str],
    ) -> None:
        self._groups, self._staging = groups, staging
        own = None if settings is None else settings.of("eight_bit", EightBitSettings)
        has_feedback = own is not None and own.error_feedback and bool(wires)
        self.memory = Residuals() if has_feedback else None

    def run(self, buffer: Tensor, wire: str) -> None:
        """Replaces `buffer`, in any number format, by its sum over ranks."""
        ranks, length = self._groups.world_size, buffer.numel()
        if ranks == 1 or length == 0:
            return
        block_format = FORMATS[wire]
        # Equal chunks of whole blocks; the last one may be longer than the rest of the buffer.
        chunk = -(-length // (ranks * BLOCK)) * BLOCK
        values = self._take("values", ranks * chunk, torch.float32, buffer)
        decoded = self._take("decoded", ranks * chunk, torch.float32, buffer)
        values[:length].copy_(buffer)
        values[length:].zero_()
        size = block_format.packed_bytes(chunk)
        own = self._take("own bytes", ranks * size, torch.uint8, buffer)
        theirs = self._take("their bytes", ranks * size, torch.uint8, buffer)
        kept = fresh = None
        if self.memory is not None:
            kept, fresh = self.memory.pair(buffer, (ranks + 1) * chunk)
            self._add_residual(values, kept[: ranks * chunk])
        for rank in range(ranks):
            span = slice(rank * chunk, (rank + 1) * chunk)
            block_format.encode(values[span], own[rank * size : (rank + 1) * size])
            if fresh is not None:
                block_format.decode(own[rank * size : (rank + 1) * size], decoded[span])
        if fresh is not None:
            self._keep_residual(values, decoded, fresh[: ranks * chunk])
        self._exchange(_all_to_all, theirs, own)
        # Adds in the order of the ranks, for the same bits on every owner.
        total = values[:chunk]
        for rank in range(ranks):
            block_format.decode(theirs[rank * size : (rank + 1) * size], total, add=rank > 0)
        if kept is not None:
            self._add_residual(total, kept[ranks * chunk :])
        block_format.encode(total, own[:size])
        if fresh is not None:
            block_format.decode(own[:size], decoded[:chunk])
            self._keep_residual(total, decoded[:chunk], fresh[ranks * chunk :])
        self._exchange(all_gather_flat, theirs, own[:size])
        for rank in range(ranks):
            block_format.decode(
                theirs[rank * size : (rank + 1) * size], decoded[rank * chunk : (rank + 1) * chunk]
            )
        buffer.copy_(decoded[:length])

    def _take(self, name: str, length: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return self._staging.take(f"quantized {name}", length, dtype, like.device)

    def _add_residual(self, values: Tensor, kept: Tensor) -> None:
        scale = None if self.memory is None else self.memory.scale
        if scale is None:
            values.add_(kept)
        else:
            values.addcmul_(kept, scale)

    def _keep_residual(self, values: Tensor, decoded: Tensor, fresh: Tensor) -> None:
        torch.sub(values, decoded, out=fresh)
        if self.memory is not None and self.memory.scale is not None:
            fresh.div_(self.memory.scale)

    def _exchange(
        self, collective: Callable[[Tensor, Tensor, Any], object], into: Tensor, out: Tensor
    ) -> None:
        """Runs a collective; with Gloo, tensors of a GPU are copied through host memory."""
        world = self._groups.world
        if not (out.is_cuda and self._groups.backend == "gloo"):
            collective(into, out, world)
            return
        cpu = torch.device("cpu")
        host_out = self._staging.take("host out", out.numel(), torch.uint8, cpu, pinned=True)
        host_in = self._staging.take("host in", into.numel(), torch.uint8, cpu, pinned=True)
        host_out.copy_(out)
        collective(host_in, host_out, world)
        into.copy_(host_in)


def _all_to_all(into: Tensor, out: Tensor, group: Any) -> None:
    dist.all_to_all_single(into, out, group=group)
