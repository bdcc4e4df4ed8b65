"""Flags of `write_jpeg.c`."""

from __future__ import annotations

PROGRESSIVE, ARITHMETIC, STORE_RGB, SEPARATE_SCANS, FEW_SCANS = 1, 2, 4, 8, 16
