"""What the steps of several policies say: rows of one result file.

psr.vs_lru_50                  step of exact LRU over PSR's at the paper's lambda, at 50 % residency
psr.vs_lru_25_moonlight_25gbs  the same of another model, over a link of 25 GB/s
psr.vs_lru_50_psr              the same of PSR as its preset has it, at Cache-Prior's own lambda
psr.vs_lru_50_psr_0_3_1_2      the same of PSR with other numbers

The paper holds PSR at lambda 0.3 (50 %) and 0.25 (25 %) against Cache-Prior at 0.2 (§1, §6.2), so its targets
are those of that pair alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.harness import Row
from bench.psr_case import Steps, is_steered
from bench.slow_link import LinkRates

_AS_PUBLISHED = "paper"
"""The policy whose rows have the plain ids, and targets."""
RATIO_TARGETS = {"lru": ">=2.2", "cache_prior": ">=1.25"}
RATIO_IDS = {"lru": "psr.vs_lru", "cache_prior": "psr.vs_cacheprior"}


class Link(enum.Enum):
    """The value is what row ids end with."""

    OWN = ""
    SLOW = "_25gbs"


class Key(NamedTuple):
    """One thing that was measured."""

    policy: str
    residency: float
    link: Link

    def __str__(self) -> str:
        over = "" if self.link is Link.OWN else ", 25 GB/s"
        return f"{self.policy} {100 * self.residency:.0f}{over}"


def rows_of(done: Mapping[Key, Steps], *, model: str, rates: LinkRates | None, note: str) -> list[Row]:
    """Rows of everything that was measured, without those that need what was not."""
    rows: list[Row] = []
    for link in Link:
        for residency in sorted({key.residency for key in done}, reverse=True):
            found = {key.policy: steps for key, steps in done.items() if key[1:] == (residency, link)}
            name = f"{100 * residency:.0f}{'' if model == 'olmoe' else f'_{model}'}{link.value}"
            said = note if link is Link.OWN or rates is None else f"{note}; {_slowed(rates)}"
            for policy in found:
                if is_steered(policy):
                    rows += _ratios(found, policy, name, said)
            rows += _of_policies(found, name)
    return rows


def _ratios(found: Mapping[str, Steps], ours: str, name: str, note: str) -> Iterator[Row]:
    """`ours`, a policy of PSR, beside those that are none."""
    psr, others = found[ours], {policy: found[policy] for policy in RATIO_IDS if policy in found}
    has_targets = ours == _AS_PUBLISHED
    name = name if has_targets else f"{name}_{_word(ours)}"
    for policy, steps in others.items():
        yield Row(
            id=f"{RATIO_IDS[policy]}_{name}",
            value=steps.mean_ms / psr.mean_ms,
            unit="ratio",
            target=RATIO_TARGETS[policy] if has_targets else None,
            reference=f"{steps.mean_ms:.3f} over {psr.mean_ms:.3f} ms, medians over texts of the mean step",
            note=note,
        )
    if len(others) == len(RATIO_IDS):
        best = min(steps.p99_ms for steps in others.values())
        yield Row(
            id=f"psr.p99_vs_best_{name}",
            value=psr.p99_ms / best,
            unit="ratio",
            target="<=1.0" if has_targets else None,
            reference=f"{psr.p99_ms:.3f} over {best:.3f} ms, the lower of the others'",
        )


def _of_policies(found: Mapping[str, Steps], name: str) -> Sequence[Row]:
    return [
        Row(id=f"psr.{quantity}_{_word(policy)}_{name}", value=value, unit=unit, note=note)
        for policy, steps in found.items()
        for quantity, value, unit, note in _quantities(steps)
    ]


def _quantities(steps: Steps) -> Iterator[tuple[str, float, str, str]]:
    decided = ", ".join(f"{name.replace('_', ' ')} {count:.1f}" for name, count in steps.logical.items())
    spread = ", ".join(f"{ms:.3f}" for ms in steps.means_ms)
    yield "p50_ms", steps.p50_ms, "ms", f"means of the texts {spread}"
    yield "p99_ms", steps.p99_ms, "ms", "of all texts together"
    yield "hit", 100 * steps.hit_rate, "%", "resident before their layer began"
    yield "copies", steps.copies, "experts", f"a token, {steps.moved_mb:.1f} MB; logically: {decided}"
    yield (
        "demand_copies",
        steps.demand_copies,
        "experts",
        f"a token; {steps.late:.2f} more were late, {steps.dropped:.2f} not awaited",
    )


def _word(policy: str) -> str:
    return policy.replace(":", "_").replace(".", "_")


def _slowed(rates: LinkRates) -> str:
    return (
        f"link slowed to 25 GB/s by other bytes beside each record (own: {rates.load:.1f} GB/s loaded by the "
        f"device, {rates.copy:.1f} copied)"
    )
