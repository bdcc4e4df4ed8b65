"""`EvalDetails`: a confusion matrix of an evaluation, and its most confident mistakes.

The results stay on the device until the end of the evaluation, so that the host does not wait.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from paceline.comm.group import Group
from paceline.config import RunConfig

MISTAKES = 24
_EDGE, _QUALITY = 64, 80
# Limits of `run.eval_details = "auto"`.
_MOST_IMAGES, _MOST_CLASSES = 20_000, 1_000


def wants_details(config: RunConfig, images: int, classes: int) -> bool:
    """Returns True if an evaluation collects `EvalDetails`. The result is equal on all ranks."""
    if config.run.eval_details == "auto":
        return images <= _MOST_IMAGES and classes <= _MOST_CLASSES
    return config.run.eval_details == "on"


class EvalDetails:
    """Collects a confusion matrix and the most confident mistakes of this rank, batch by batch.

    `gather` combines those of all ranks.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(0, device=device)
        self._labels = torch.zeros(0, dtype=torch.int64, device=device)
        self._predicted = self._labels.clone()
        self._images: Tensor | None = None

    def add(self, outputs: Tensor, labels: Tensor, images: Tensor) -> None:
        """Adds the predictions of a batch.

        Args:
            outputs: Logits on the device, samples × outputs.
            labels: Integer labels on the device.
            images: uint8 images, samples × height × width × channels.
        """
        confidence, predicted = outputs.softmax(dim=1).max(dim=1)
        # A model may have more outputs than there are classes.
        inside = predicted.clamp(max=self._classes - 1)
        self._counts.index_add_(0, labels * self._classes + inside, torch.ones_like(labels))
        wrong = torch.where(predicted == labels, -torch.ones_like(confidence), confidence)
        highest = wrong.topk(min(MISTAKES, len(labels)))
        shown = images.to(outputs.device, non_blocking=True)[highest.indices]
        kept = shown if self._images is None else torch.cat([self._images, shown])
        confidence = torch.cat([self._confidence, highest.values])
        best = confidence.topk(min(MISTAKES, len(confidence)))
        self._confidence, self._images = best.values, kept[best.indices]
        self._labels = torch.cat([self._labels, labels[highest.indices]])[best.indices]
        self._predicted = torch.cat([self._predicted, inside[highest.indices]])[best.indices]

    def gather(self, group: Group, step: int, classes: list[str]) -> bytes | None:
        """Combines the counts and mistakes of all ranks. All ranks call this.

        Args:
            group: The ranks.
            step: Number of training steps after which the weights were evaluated.
            classes: Names of the classes.

        Returns:
            The content of `evaluation.json` on rank 0, None on all other ranks.
        """
        group.all_reduce_sum(self._counts)
        gathered = group.gather_bytes(json.dumps(self._mistakes()).encode())
        if gathered is None:
            return None
        mistakes = [mistake for sent in gathered for mistake in json.loads(sent)]
        mistakes.sort(key=lambda mistake: -mistake["confidence"])
        counts = self._counts.cpu().view(self._classes, self._classes)
        listed = [[*place, int(counts[tuple(place)])] for place in counts.nonzero().tolist()]
        return json.dumps(
            {"step": step, "classes": classes, "counts": listed, "mistakes": mistakes[:MISTAKES]}
        ).encode()

    def _mistakes(self) -> list[dict[str, Any]]:
        if self._images is None:
            return []
        images = self._images.cpu()
        columns = (self._confidence, self._labels, self._predicted)
        rows = zip(*(column.tolist() for column in columns), images, strict=True)
        return [
            {
                "label": label, "predicted": predicted, "confidence": round(confidence, 4),
                "image": thumbnail(image),
            }
            for confidence, label, predicted, image in rows
            if confidence > 0
        ]  # fmt: skip


def thumbnail(image: Tensor) -> str:
    """Returns a small JPEG of the image in base64; "" unless the image has one or three channels."""
    channels = image.shape[-1]
    if channels not in (1, 3):
        return ""
    pixels = image.numpy()
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    small = ImageOps.contain(picture, (_EDGE, _EDGE), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    small.convert("RGB").save(buffer, "JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
