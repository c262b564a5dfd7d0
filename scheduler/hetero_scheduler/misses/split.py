"""The split of a layer's misses with the earliest finish, and a split by number.

    device   hits ─ load ─ load ─ load ┤                    device_s[number loaded]
    CPU      in place ── in place ─────┤                    sum of in_place_s
                                       ^ the later of the two, as early as it can be

What a load takes does not depend on the expert, so only the number of loads matters to the device, and of all
choices with that number the CPU is done first with the experts that are cheapest to it. So the best of
n + 1 candidates is the best of all 2^n: the tests compare with those.
"""

from __future__ import annotations

import numpy as np

from hetero_scheduler.misses.base import Floats, Integers


def split_by_cost(in_place_s: Floats, device_s: Floats, worth: Floats) -> Integers:
    """Positions, ascending, of the misses to compute in place so that the later side finishes earliest.

    `in_place_s` `[n]`: seconds of each on the CPU. `device_s` `[n + 1]`: seconds of the device when so many
    of them are loaded, never falling. Of misses that cost the CPU the same, those of least `worth` `[n]` are
    computed in place. Of splits that finish alike the one with most loads is taken: they stay resident.
    """
    order = np.lexsort((worth, in_place_s))
    cpu_s = np.concatenate([[0.0], np.cumsum(in_place_s[order])])  # [number in place]
    number = int(np.argmin(np.maximum(cpu_s, device_s[::-1])))
    return np.sort(order[:number])


def least_worth(number: int, worth: Floats) -> Integers:
    """Positions, ascending, of the `number` misses of least worth."""
    return np.sort(np.argsort(worth, kind="stable")[:number])
