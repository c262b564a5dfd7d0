"""The split of a layer's misses with the earliest finish, and a split by number.

    device        hits ─ load ─ load ─ load ┤                device_s[number loaded]
    CPU     ─ call ┬ in place ── in place ──┤                sum of in_place_s
                   ^ handed over            ^ the later of the two, as early as it can be

What a load takes does not depend on the expert, so only the number of loads matters to the device, and of all
choices with that number the CPU is done first with the experts that are cheapest to it. So the best of
n + 1 candidates is the best of all 2^n: the tests compare with those.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_by_cost(
    in_place_s: Sequence[float],
    device_s: Sequence[float],
    worth: Sequence[float],
    *,
    call_s: float,
) -> list[int]:
    """Positions, ascending, of the misses to compute in place so that the later side finishes earliest.

    `in_place_s` `[n]`: seconds of each on the CPU. `device_s` `[n + 1]`: seconds of the device when so many
    of them are loaded, never falling. `call_s`: what handing over takes if anything is computed in place at
    all; both sides wait for it. Of misses that cost the CPU the same, those of least `worth` `[n]` are
    computed in place. Of splits that finish alike the one with most loads is taken: they stay resident.
    """
    num_misses = len(in_place_s)
    order = sorted(range(num_misses), key=lambda i: (in_place_s[i], worth[i]))
    number, earliest, cpu_s = 0, device_s[num_misses], 0.0
    for position, i in enumerate(order, start=1):
        cpu_s += in_place_s[i]
        finish_s = call_s + max(cpu_s, device_s[num_misses - position])
        if finish_s < earliest:
            number, earliest = position, finish_s
    return sorted(order[:number])


def least_worth(number: int, worth: Sequence[float]) -> list[int]:
    """Positions, ascending, of the `number` misses of least worth."""
    return sorted(sorted(range(len(worth)), key=worth.__getitem__)[:number])
