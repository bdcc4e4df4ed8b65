"""PyTorch's own tests of DistributedDataParallel, run with `pl.DataParallel`: `make ddp-conformance`."""
