"""The communication module: process groups, agreement, and the exchange of gradients.

torch.distributed (NCCL, Gloo) is the engine; nothing here opens a socket of its own.
"""
