"""What the user wrote stays; what contradicts it is no candidate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hetero_runtime.config import load_config
from hetero_runtime.errors import ConfigError
from hetero_runtime.tuning import find_candidates
from hetero_runtime.tuning.base import Candidate


def candidates(**sections: Any) -> dict[str, Candidate]:
    """By name, in order, of `preset: auto` with these sections."""

    def make(beneath: Any) -> Any:
        return load_config({"preset": "auto", **sections}, beneath=beneath)

    return {candidate.name: candidate for candidate in find_candidates(make)}


def test_exact_ones_are_alternatives_of_lru() -> None:
    found = candidates()
    assert list(found) == ["lru", "lfru", "seqmoe", "misses split", "misses on the CPU"]
    assert all(candidate.is_exact for candidate in found.values())
    assert found["lru"].config == load_config({"preset": "auto"})
    assert found["seqmoe"].config.eviction.policy == "belady"
    assert found["misses split"].config.misses.handler == "hybrid"


def test_a_budget_adds_steered_routing() -> None:
    found = candidates(routing={"kl_budget": 0.01})
    steered = [candidate for candidate in found.values() if not candidate.is_exact]
    assert [candidate.config.routing.bonus for candidate in steered] == [0.1, 0.2, 0.3]
    assert {candidate.config.routing.policy for candidate in steered} == {"psr"}
    assert next(iter(found)) == "lru"


def test_keys_that_are_written_win_and_leave_fewer_candidates() -> None:
    found = candidates(misses={"handler": "load"}, eviction={"policy": "lru"})
    assert {candidate.config.misses.handler for candidate in found.values()} == {"load"}
    assert {candidate.config.eviction.policy for candidate in found.values()} == {"lru"}
    assert list(found) == ["lru", "seqmoe"]  # its schedule is left to choose
    found = candidates(
        misses={"handler": "load"}, eviction={"policy": "lru"}, prefetch={"schedule": "popularity"}
    )
    assert list(found) == ["lru"]


def test_drafts_leave_what_goes_with_them() -> None:
    found = candidates(speculation={"drafter": "prompt_lookup"})
    assert list(found) == ["lru", "lfru", "misses split", "misses on the CPU"]


def test_what_deviates_stands_alone_since_it_would_be_the_measure() -> None:
    assert list(candidates(routing={"policy": "cache_prior"}, eviction={"policy": "logical"})) == ["lru"]


def test_a_mode_that_stands_by_name_is_all_candidates_own() -> None:
    found = candidates(execution={"mode": "graph"})
    assert list(found) == ["lru", "lfru", "seqmoe", "misses split", "misses on the CPU"]
    assert {candidate.config.execution.mode for candidate in found.values()} == {"graph"}


def test_otherwise_each_has_the_mode_that_is_best_for_it() -> None:
    assert {candidate.config.execution.mode for candidate in candidates().values()} == {"auto"}


def test_a_budget_is_for_auto_alone() -> None:
    message = r"routing\.kl_budget: 0\.1 is what preset: auto may spend, and preset is lru"
    with pytest.raises(ConfigError, match=message):
        load_config({"routing": {"kl_budget": 0.1}})
    assert load_config({"preset": "auto", "routing": {"kl_budget": 0.1}}).routing.kl_budget == 0.1


def test_what_contradicts_itself_is_told_before_anything_is_measured() -> None:
    make = partial(load_config, {"preset": "auto", "speculation": {"k": 3}})
    with pytest.raises(ConfigError, match=r"speculation\.k: 3 is for a drafter"):
        find_candidates(lambda beneath: make(beneath=beneath))
