"""Communication: process groups, agreement between ranks, all-reduce algorithms, the gradient exchange.

torch.distributed (NCCL, Gloo) transfers the tensors. Public names are loaded on first use, so that
importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.comm.exchange import SIGNALS as SIGNALS
    from paceline.comm.exchange import GradientExchange as GradientExchange
    from paceline.comm.exchange import Signals as Signals
    from paceline.comm.group import Group as Group
    from paceline.comm.hybrid import HybridAllReduce as HybridAllReduce
    from paceline.comm.peer_errors import AgreedError as AgreedError
    from paceline.comm.peer_errors import PeerError as PeerError
    from paceline.comm.process_groups import ProcessGroups as ProcessGroups
    from paceline.comm.progress import ExchangeObserver as ExchangeObserver
    from paceline.comm.settings import CommSettings as CommSettings
    from paceline.comm.tracing import Timeline as Timeline
    from paceline.comm.transport import Transport as Transport
    from paceline.comm.transport import create_transport as create_transport
    from paceline.plan.size_table import SizeTable as SizeTable

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
