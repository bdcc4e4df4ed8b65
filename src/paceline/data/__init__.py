"""The input pipeline: sources, decoding, augmentation and batches, made ahead of their use.

`open_source` opens a data set; `create_train_loader` and `create_eval_loader` make batches of it.
The public names are imported when they are first used, so that reading settings does not import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.data.augment import EvalTransform, TrainTransform, random_box
    from paceline.data.batch import Batch
    from paceline.data.chunk import CorruptSample, allowed_corrupt
    from paceline.data.decode.decoder import Decoder
    from paceline.data.decode.library import RegionUnavailableError, region_library
    from paceline.data.device.augment import Normalizer
    from paceline.data.device.streams import mark_stream
    from paceline.data.image import CorruptImage, to_mode
    from paceline.data.loaders.create import create_eval_loader, create_train_loader
    from paceline.data.loaders.image_loader import ImageLoader
    from paceline.data.loaders.loader import EvalBatches, EvalLoader, TrainBatches, TrainLoader
    from paceline.data.order import BatchPlan, Int64, SampleOrder
    from paceline.data.own_augment import BatchAugment, ImageAugment
    from paceline.data.pack.inspect import inspect_set
    from paceline.data.pack.manifest import PackedSplit, PackOptions
    from paceline.data.pack.pack import pack_splits
    from paceline.data.pack.splits import (
        OpenedFiles,
        as_source,
        describe_channels,
        open_data,
        open_other,
        open_source,
        open_splits,
    )
    from paceline.data.prefetch import divide_wait, sum_by_stage
    from paceline.data.settings import DataSettings
    from paceline.data.sources.base import Source, Split
    from paceline.data.sources.dataset import DatasetSource
    from paceline.data.sources.labels import numbered_classes
    from paceline.data.sources.layouts import SyntheticImages, register_source

__all__ = [
    "Batch", "BatchAugment", "BatchPlan", "CorruptImage", "CorruptSample", "DataSettings",
    "DatasetSource", "Decoder", "EvalBatches", "EvalLoader", "EvalTransform", "ImageAugment",
    "ImageLoader", "Int64", "Normalizer", "OpenedFiles", "PackOptions", "PackedSplit",
    "RegionUnavailableError", "SampleOrder", "Source", "Split", "SyntheticImages", "TrainBatches",
    "TrainLoader",
    "TrainTransform", "allowed_corrupt", "as_source", "create_eval_loader", "create_train_loader",
    "describe_channels", "divide_wait", "inspect_set", "mark_stream", "numbered_classes",
    "open_data", "open_other", "open_source", "open_splits", "pack_splits", "random_box",
    "region_library", "register_source", "sum_by_stage", "to_mode",
]  # fmt: skip
_MODULES = {
    "augment": "EvalTransform TrainTransform random_box",
    "batch": "Batch",
    "chunk": "CorruptSample allowed_corrupt",
    "decode.decoder": "Decoder",
    "decode.library": "RegionUnavailableError region_library",
    "device.augment": "Normalizer",
    "device.streams": "mark_stream",
    "image": "CorruptImage to_mode",
    "loaders.create": "create_eval_loader create_train_loader",
    "loaders.image_loader": "ImageLoader",
    "loaders.loader": "EvalBatches EvalLoader TrainBatches TrainLoader",
    "order": "BatchPlan Int64 SampleOrder",
    "own_augment": "BatchAugment ImageAugment",
    "pack.inspect": "inspect_set",
    "pack.manifest": "PackOptions PackedSplit",
    "pack.pack": "pack_splits",
    "pack.splits": "OpenedFiles as_source describe_channels open_data open_other open_source open_splits",
    "prefetch": "divide_wait sum_by_stage",
    "settings": "DataSettings",
    "sources.base": "Source Split",
    "sources.dataset": "DatasetSource",
    "sources.labels": "numbered_classes",
    "sources.layouts": "SyntheticImages register_source",
}
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(
        __name__, {name: module for module, names in _MODULES.items() for name in names.split()}
    )
