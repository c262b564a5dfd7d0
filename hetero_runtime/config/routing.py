"""Which keys of `routing` each policy reads, what goes together with it, and what its `auto` means."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from hetero_runtime.config.available import as_yaml
from hetero_runtime.config.tree import Config, PrefetchConfig, Priority, RoutingConfig
from hetero_runtime.errors import ConfigError

if TYPE_CHECKING:
    from hetero_runtime.plan.geometry import Geometry

_CACHE = ("priority", "capacity", "calibration")
READS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "cache_prior": ("bonus", "protected", "range", *_CACHE),
    "psr": ("bonus", "insertions", "window", *_CACHE),
    "speculative_experts": ("insertions", "window", *_CACHE),
    "block_selection": ("growth", "rerouting", "rescue", "capacity"),
}
"""By routing.policy."""
INSERTING = ("psr", "speculative_experts")


def check_routing(config: Config, source: str) -> None:
    """Raise ConfigError, naming the keys, their values and the fix."""
    _check_keys(config, source)
    policy = config.routing.policy
    schedule, in_flight = config.prefetch.schedule, config.prefetch.in_flight
    if schedule == "bounded" and policy not in INSERTING:
        raise ConfigError(
            f"{source}: prefetch.schedule: bounded fetches what a routing policy inserts, and "
            f"routing.policy: {policy} inserts nothing; write routing.policy: psr, or prefetch.schedule: "
            "popularity"
        )
    if schedule != "bounded" and in_flight != PrefetchConfig.in_flight:
        raise ConfigError(
            f"{source}: prefetch.in_flight: {in_flight} is for prefetch.schedule: bounded, and it is "
            f"{schedule}; write that, or leave prefetch.in_flight out"
        )
    if config.eviction.policy == "logical" and "calibration" not in READS[policy]:
        raise ConfigError(
            f"{source}: eviction.policy: logical follows the logical cache of a routing policy, and "
            f"routing.policy: {policy} has none; write routing.policy: psr, or eviction.policy: lru"
        )
    if policy != "exact":
        _check_machinery(config, source)


def resolve_routing(routing: RoutingConfig, geometry: Geometry, *, slabs: int) -> RoutingConfig:
    """Decide what the policy reads, but the calibration file, which is looked for before. `slabs`: of all
    layers. Raises ConfigError for what no layer of this model can do."""
    if routing.policy == "exact":
        return routing
    top_k, num_experts = geometry.top_k, geometry.num_experts
    if routing.protected > top_k:
        raise ConfigError(
            f"routing.protected={routing.protected} is more than the {top_k} experts of a token; write "
            f"{top_k} or less"
        )
    by_slabs = min(max(slabs // geometry.num_moe_layers, top_k), num_experts)
    capacity = by_slabs if routing.capacity == "auto" else routing.capacity
    if not top_k <= capacity <= num_experts:
        raise ConfigError(
            f"routing.capacity={capacity}: a token needs {top_k} of a layer's {num_experts} experts at once; "
            f"write {top_k} to {num_experts}, or auto"
        )
    by_default: Priority = "lru" if routing.policy == "cache_prior" else "a"
    if "priority" in READS[routing.policy] and routing.priority == "auto":
        routing = replace(routing, priority=by_default)
    return replace(routing, capacity=capacity)


def require_exact(routing: RoutingConfig, what: str) -> None:
    """Raise ConfigError unless the router's own choice is executed. `what`: a sentence on why it must be."""
    if routing.policy != "exact":
        raise ConfigError(
            f"routing.policy: {routing.policy} deviates from the model on purpose, and {what}; write "
            "routing.policy: exact"
        )


def _check_keys(config: Config, source: str) -> None:
    """No key is ignored; a default beside a policy that does not read it says nothing."""
    routing, read = config.routing, READS[config.routing.policy]
    if routing.kl_budget and config.preset != "auto":
        raise ConfigError(
            f"{source}: routing.kl_budget: {routing.kl_budget} is what preset: auto may spend, and preset is "
            f"{config.preset}; write preset: auto, or leave routing.kl_budget out"
        )
    for field in fields(RoutingConfig)[1:]:
        if field.name == "kl_budget":
            continue
        value = getattr(routing, field.name)
        if field.name not in read and value != field.default:
            readers = ", ".join(policy for policy, names in READS.items() if field.name in names)
            raise ConfigError(
                f"{source}: routing.{field.name}: {as_yaml(value)} is for routing.policy: {readers}, and it "
                f"is {routing.policy}; leave it out, or write such a policy"
            )


def _check_machinery(config: Config, source: str) -> None:
    policy = config.routing.policy
    in_flight = config.prefetch.in_flight
    if config.execution.mode == "graph" and in_flight != PrefetchConfig.in_flight:
        raise ConfigError(
            f"{source}: prefetch.in_flight: {in_flight} with execution.mode: graph is not in this version; "
            "a captured step sends one copy after another: leave prefetch.in_flight out"
        )
    drafter = config.speculation.drafter
    if policy == "block_selection" and drafter == "none":
        raise ConfigError(
            f"{source}: routing.policy: block_selection chooses experts for the tokens of a draft, and "
            "speculation.drafter is none; write speculation.drafter: prompt_lookup, or routing.policy: exact"
        )
    if policy != "block_selection" and drafter != "none":
        raise ConfigError(
            f"{source}: routing.policy: {policy} with speculation.drafter: {drafter} is not in this version; "
            "write speculation.drafter: none, or routing.policy: block_selection or exact"
        )
    if config.memory.pinned_prefix not in ("auto", 0):
        raise ConfigError(
            f"{source}: routing.policy: {policy} with memory.pinned_prefix: {config.memory.pinned_prefix} is "
            "not in this version; write memory.pinned_prefix: 0"
        )
