"""The input pipeline: sources, decoding, augmentation and prefetched batches.

`open_source` opens a data set. `create_train_loader` and `create_eval_loader` make batches of it.
The public names are imported on first use, so that reading settings does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.data.augment import EvalTransform, TrainTransform
    from paceline.data.batch import Batch, mark_stream
    from paceline.data.decode.decoder import Decoder, RegionUnavailableError
    from paceline.data.decode.library import region_library
    from paceline.data.device.normalize import Normalizer
    from paceline.data.image import (
        CorruptImage,
        CorruptSample,
        allowed_corrupt,
        image_facts,
        to_mode,
    )
    from paceline.data.loaders.create import create_eval_loader, create_train_loader
    from paceline.data.loaders.image_loader import ImageLoader
    from paceline.data.loaders.loader import EvalBatches, EvalLoader, TrainBatches, TrainLoader
    from paceline.data.order import BatchPlan, Int64, SampleOrder
    from paceline.data.own_augment import BatchAugment, ImageAugment
    from paceline.data.pack.inspect import inspect_set, open_splits
    from paceline.data.pack.pack import pack_splits
    from paceline.data.prefetch import divide_wait, sum_by_stage
    from paceline.data.settings import DataSettings
    from paceline.data.sources.base import Source, Split
    from paceline.data.sources.classes import numbered_classes
    from paceline.data.sources.dataset import DatasetSource
    from paceline.data.sources.opening import (
        as_source,
        open_data,
        open_other,
        open_source,
        open_unsplit,
    )
    from paceline.data.sources.pack_manifest import PackedSplit, PackOptions
    from paceline.data.sources.registry import register_source
    from paceline.data.sources.synthetic import SyntheticImages

__all__ = [
    "Batch", "BatchAugment", "BatchPlan", "CorruptImage", "CorruptSample", "DataSettings",
    "DatasetSource", "Decoder", "EvalBatches", "EvalLoader", "EvalTransform", "ImageAugment",
    "ImageLoader", "Int64", "Normalizer", "PackOptions", "PackedSplit",
    "RegionUnavailableError", "SampleOrder", "Source", "Split", "SyntheticImages", "TrainBatches",
    "TrainLoader",
    "TrainTransform", "allowed_corrupt", "as_source", "create_eval_loader", "create_train_loader",
    "divide_wait", "image_facts", "inspect_set", "mark_stream", "numbered_classes",
    "open_data", "open_other", "open_source", "open_splits", "open_unsplit", "pack_splits",
    "region_library", "register_source", "sum_by_stage", "to_mode",
]  # fmt: skip
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
