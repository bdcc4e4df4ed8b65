"""The algorithms by name.

In: a name and the process groups. Out: the algorithm in the form that suits the backend: explicit
messages over Gloo, NCCL's own collectives in rows and columns over NCCL.
"""

from __future__ import annotations

from paceline.comm.algorithms.all_reduce import AllReduce
from paceline.comm.algorithms.central import Central
from paceline.comm.algorithms.halving_doubling import HalvingDoubling
from paceline.comm.algorithms.hierarchical import Hierarchical
from paceline.comm.algorithms.names import check_name
from paceline.comm.algorithms.native import Native
from paceline.comm.algorithms.nested_collectives import NestedHierarchical, NestedTorus2d
from paceline.comm.algorithms.ring import Ring
from paceline.comm.algorithms.staging import Staging
from paceline.comm.algorithms.torus2d import Torus2d
from paceline.comm.algorithms.tree import Tree
from paceline.comm.process_groups import ProcessGroups


def create_algorithm(name: str, groups: ProcessGroups, staging: Staging | None = None) -> AllReduce:
    """`staging` may be shared by algorithms that run one after the other."""
    check_name(name)
    if name == "native":
        return Native(groups)
    if groups.has_parts and name == "hierarchical":
        return NestedHierarchical(groups, staging)
    if groups.has_parts and name == "torus2d" and groups.layout.is_uniform:
        return NestedTorus2d(groups, staging)
    explicit = {
        made.name: made for made in (Ring, Hierarchical, Torus2d, HalvingDoubling, Tree, Central)
    }
    algorithm = explicit[name](groups, staging)
    algorithm.connect()
    return algorithm
