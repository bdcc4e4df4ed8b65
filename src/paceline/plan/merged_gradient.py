"""The merged-gradient rule (MG-WFBP, Shi et al. 2018): the baseline for fusion.

In: when each gradient is ready and its bytes, in order of readiness, and the exchange's cost a + b·m.
Out: groups of gradients that travel together.
"""

from __future__ import annotations

from collections.abc import Sequence


def merge_gradients(
    ready_s: Sequence[float], sizes: Sequence[float], start_up_s: float, byte_s: float
) -> list[list[int]]:
    """A group joins the next gradient if that one is ready before the group's message, begun as soon as
    the channel is free, would have got through its start-up: waiting then costs less than a second
    start-up does."""
    groups: list[list[int]] = []
    free, first = 0.0, 0
    for last in range(len(ready_s)):
        begins = max(free, ready_s[last])
        if last + 1 < len(ready_s) and ready_s[last + 1] < begins + start_up_s:
            continue
        group = list(range(first, last + 1))
        free = begins + start_up_s + byte_s * sum(sizes[i] for i in group)
        groups.append(group)
        first = last + 1
    return groups
