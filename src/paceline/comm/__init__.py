"""Communication: process groups, agreement between ranks, all-reduce algorithms, the gradient exchange.

torch.distributed (NCCL, Gloo) does the work; nothing here opens a socket of its own. Public names load
on first use: importing this package does not import torch.
"""

from __future__ import annotations

from paceline.core import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SIGNALS": "exchange",
        "AgreedError": "peer_errors",
        "CommSettings": "settings",
        "ExchangeObserver": "progress",
        "GradientExchange": "exchange",
        "Group": "group",
        "HybridAllReduce": "hybrid",
        "PeerError": "peer_errors",
        "ProcessGroups": "process_groups",
        "Signals": "exchange",
        "SizeTable": "paceline.plan.size_table",
        "Timeline": "tracing",
        "Transport": "transport",
        "create_transport": "transport",
    },
)
