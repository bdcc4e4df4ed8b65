"""Prints the error of a sum over p ranks in each wire format against fp64, as a share of Σ|x|.

python wire_error_table.py > raw/wire-error.tsv
"""

from paceline.comm.algorithms.names import ALGORITHMS
from paceline.comm.wire import WIRES, WireFormat
from paceline.comm.wire_error import measure_error

print("wire", "algorithm", "ranks", "worst", "bound", "finite", sep="\t")
for wire in WIRES:
    for algorithm in ALGORITHMS:
        for ranks in (2, 16, 128, 1024, 8192):
            found = measure_error(algorithm, ranks, WireFormat.named(wire, ranks))
            print(wire, algorithm, ranks, f"{found.worst:.2e}", f"{found.bound:.2e}",
                  found.finite, sep="\t")  # fmt: skip
