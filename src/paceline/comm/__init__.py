"""Communication: process groups, agreement between ranks, all-reduce algorithms, the gradient exchange.

torch.distributed (NCCL, Gloo) transfers the tensors. Public names are loaded on first use, so that
importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.comm.exchange import SIGNALS, GradientExchange, Signals
    from paceline.comm.group import Group
    from paceline.comm.hybrid import HybridAllReduce
    from paceline.comm.peer_errors import AgreedError, PeerError
    from paceline.comm.process_groups import ProcessGroups
    from paceline.comm.progress import ExchangeObserver
    from paceline.comm.settings import CommSettings
    from paceline.comm.tracing import Timeline
    from paceline.comm.transport import Transport, create_transport
    from paceline.plan.size_table import SizeTable

__all__ = [
    "SIGNALS",
    "AgreedError",
    "CommSettings",
    "ExchangeObserver",
    "GradientExchange",
    "Group",
    "HybridAllReduce",
    "PeerError",
    "ProcessGroups",
    "Signals",
    "SizeTable",
    "Timeline",
    "Transport",
    "create_transport",
]

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
