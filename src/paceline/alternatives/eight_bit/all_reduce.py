"""8-bit wire formats with error feedback, and the all-reduce that sums them.

No backend sums 8-bit numbers, and a sum of them would need more bits. So each rank owns a chunk of the
buffer: it receives every rank's quantized chunk (all-to-all), adds them in fp32, quantizes the sum and
sends it to all (all-gather). All ranks decode the same bytes, and so end bit-identical.

What rounding cuts off is not lost: a rank adds it to the next step's gradients before it quantizes them
(error feedback, Seide et al. 2014, Karimireddy et al. 2019), and the owner of a chunk does the same with
what its sum loses (Tang et al. 2019). Residuals are kept in units of the unscaled gradient, so that the
loss scale may change between steps.
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
    """Blocks of `BLOCK` numbers with one fp32 scale each: the block's largest magnitude becomes the
    largest number of the format. Packed: all scales, then all numbers, one byte each."""

    dtype: torch.dtype
    largest: float

    def packed_bytes(self, length: int) -> int:
        """Of `length` numbers, a multiple of the block."""
        return length + length // BLOCK * SCALE_BYTES

    def encode(self, values: Tensor, packed: Tensor) -> None:
        """Quantizes fp32 `values`, whole blocks, into bytes. A block with a number that is not finite
        decodes to NaN throughout, so that every rank skips the step."""
        rows = values.view(-1, BLOCK)
        scales, numbers = self._parts(packed)
        scales.copy_(rows.abs().amax(dim=1).div_(self.largest))
        # A block of zeros, or one too small for a scale: its residual keeps what it has.
        divisor = torch.where(scales == 0, 1.0, scales)
        scaled = rows / divisor[:, None]
        if self.dtype == torch.int8:
            # Next to an infinite scale there are NaNs, which an integer cannot hold.
            scaled = scaled.nan_to_num_(0.0).round_()
        numbers.copy_(scaled.clamp_(-self.largest, self.largest))

    def decode(self, packed: Tensor, out: Tensor, *, add: bool = False) -> None:
        """The fp32 numbers of `packed`, in `out` or added to it."""
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
    """What quantization has cut off, for each message: of this rank's gradients and of its chunk of the
    sums. A step reads `kept` and writes `fresh`; `commit` takes the fresh ones over unless the step
    leaves no trace."""

    kind = "residuals"

    def __init__(self) -> None:
        super().__init__()
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._saved: Tensor | None = None

    def pair(self, buffer: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """`kept` and `fresh` of the message that `buffer` holds, `length` elements of each. Messages come
        in one order, so that a checkpoint needs no names for them."""
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._pairs:
            kept = torch.zeros(length, device=buffer.device)
            if self._saved is not None:
                if len(self._saved) < length:
                    raise CheckpointError(
                        "the checkpoint's residuals are of other messages",
                        "resume with the settings of [comm] that it was written with",
                    )
                kept.copy_(self._saved[:length])
                self._saved = self._saved[length:]
            self._pairs[key] = (kept, torch.zeros_like(kept))
        return self._pairs[key]

    def commit(self, discard: Tensor) -> None:
        """After the update; `discard`, a flag on the device, says whether the step leaves no trace."""
        for kept, fresh in self._pairs.values():
            torch.where(discard > 0, kept, fresh, out=kept)

    def state(self) -> dict[str, Any]:
        """This rank's, for a checkpoint."""
        kept = [kept.cpu() for kept, _ in self._pairs.values()]
        # Of messages that have not travelled since a checkpoint was loaded, as they were.
        left = [] if self._saved is None else [self._saved]
        return {"kept": torch.cat([*kept, *left]) if kept or left else torch.zeros(0)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Of the same rank, and of messages of the same sizes."""
        kept = saved.get("kept")
        if not isinstance(kept, Tensor) or kept.dim() != 1:
            raise CheckpointError("its residuals are no list of numbers", "use another checkpoint")
        self._saved, self._pairs = kept.float(), {}

    @property
    def state_bytes(self) -> int:
        """Of device memory."""
        return sum(kept.nbytes + fresh.nbytes for kept, fresh in self._pairs.values())


class QuantizedAllReduce:
    """Sums buffers over ranks in 8-bit formats. Every rank calls `run` with the same buffers in the
    same order. Without settings, or without error feedback, what is cut off is lost."""

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging,
        settings: CommSettings | None,
        wires: Sequence[str],
    ) -> None:
        self._groups, self._staging = groups, staging
        self._corrected = {
            wire
            for wire in wires
            if settings is not None and settings.of("eight_bit", EightBitSettings).error_feedback
        }
        self.memory = Residuals() if self._corrected else None

    def run(self, buffer: Tensor, wire: str) -> None:
        """Replaces `buffer`, of any number format, by its sum over ranks."""
        ranks, length = self._groups.world_size, buffer.numel()
        if ranks == 1 or length == 0:
            return
        form = FORMATS[wire]
        # Equal chunks of whole blocks; the last may end behind the buffer.
        chunk = -(-length // (ranks * BLOCK)) * BLOCK
        values = self._take("values", ranks * chunk, torch.float32, buffer)
        decoded = self._take("decoded", ranks * chunk, torch.float32, buffer)
        values[:length].copy_(buffer)
        values[length:].zero_()
        size = form.packed_bytes(chunk)
        own = self._take("own bytes", ranks * size, torch.uint8, buffer)
        theirs = self._take("their bytes", ranks * size, torch.uint8, buffer)
        kept = fresh = None
        if self.memory is not None and wire in self._corrected:
            kept, fresh = self.memory.pair(buffer, (ranks + 1) * chunk)
            self._add_residual(values, kept[: ranks * chunk])
        for rank in range(ranks):
            span = slice(rank * chunk, (rank + 1) * chunk)
            form.encode(values[span], own[rank * size : (rank + 1) * size])
            if fresh is not None:
                form.decode(own[rank * size : (rank + 1) * size], decoded[span])
        if fresh is not None:
            self._keep_residual(values, decoded, fresh[: ranks * chunk])
        self._exchange(_all_to_all, theirs, own)
        # In the order of the ranks: the sum has the same bits wherever it is made.
        total = values[:chunk]
        for rank in range(ranks):
            form.decode(theirs[rank * size : (rank + 1) * size], total, add=rank > 0)
        if kept is not None:
            self._add_residual(total, kept[ranks * chunk :])
        form.encode(total, own[:size])
        if fresh is not None:
            form.decode(own[:size], decoded[:chunk])
            self._keep_residual(total, decoded[:chunk], fresh[ranks * chunk :])
        self._exchange(_all_gather, theirs, own[:size])
        for rank in range(ranks):
            form.decode(
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
        self, collective: Callable[[Tensor, Tensor, Any], None], into: Tensor, out: Tensor
    ) -> None:
        """Over Gloo, GPU memory travels through the host's."""
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


def _all_gather(into: Tensor, out: Tensor, group: Any) -> None:
    all_gather_flat(into, out, group=group)
