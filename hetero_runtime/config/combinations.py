"""Values that are fine alone and make no sense together."""

from __future__ import annotations

from hetero_runtime.config.forecasts import (
    FORECAST_EVICTIONS,
    TRAINED,
    acts_on_forecasts,
    reads_whole_tokens,
    schedules_forecasts,
)
from hetero_runtime.config.routing import check_routing
from hetero_runtime.config.tree import Config, SpeculationConfig
from hetero_runtime.config.vision import check_vision
from hetero_runtime.errors import ConfigError

MOST_CHECKED = 8
"""Tokens of a captured step, which are also those of its expert kernels."""
_FORESIGHT_IN_GRAPH: dict[str, tuple[str, tuple[str, ...]]] = {
    "mamba2": ("jsd", ("belady",)),
    "lookahead_mlp": ("top_b", ("lookahead", "lru", "lfu", "lfru")),
}
"""By predictor, the schedule and the eviction policies that a captured step knows with it."""


def check_combinations(config: Config, source: str) -> None:
    """Raise ConfigError, naming the keys, their values and the fix."""
    _check_memory(config, source)
    _check_backing(config, source)
    _check_forecasts(config, source)
    check_mode(config, source)
    _check_speculation(config, source)
    check_routing(config, source)
    if config.routing.policy != "exact" and acts_on_forecasts(config):
        raise ConfigError(
            f"{source}: routing.policy: {config.routing.policy} moves experts by its logical cache, and "
            f"{_listener(config)} by forecasts; write eviction.policy: logical and prefetch.schedule: "
            "bounded (or none), or take preset: psr"
        )
    _check_misses(config, source)
    check_vision(config, source)
    if config.vision.keep_ratio not in (1, "auto") and reads_whole_tokens(config):
        raise ConfigError(
            f"{source}: vision.keep_ratio: {config.vision.keep_ratio} ends tokens behind the pinned prefix, "
            f"and {_listener(config)} acts on forecasts of prediction.predictor: "
            f"{config.prediction.predictor}, which "
            "reads every layer of each token; write preset: lru, or vision.keep_ratio: 1"
        )


def check_mode(config: Config, source: str) -> None:
    """Raise ConfigError for what the mode that stands there cannot do; `auto` may be either."""
    rows = config.execution.max_rows
    if config.prediction.predictor == "pregate":
        _check_pregate(config, source)
    if config.execution.mode != "graph":
        return
    if rows > MOST_CHECKED and config.speculation.drafter == "none":
        raise ConfigError(
            f"{source}: execution.max_rows: {rows} with execution.mode: graph is too many: a captured step "
            f"has {MOST_CHECKED} rows at most; write execution.max_rows: {MOST_CHECKED}, or "
            "execution.mode: eager"
        )
    if config.prediction.predictor != "pregate" and acts_on_forecasts(config):
        _check_foresight_in_graph(config, source)


def require_no_drafter(speculation: SpeculationConfig, what: str) -> None:
    """Raise ConfigError, with the reason `what`, where tokens are drafted."""
    if speculation.drafter != "none":
        raise ConfigError(
            f"speculation.drafter: {speculation.drafter} has several tokens read at once, and {what}; write "
            "speculation.drafter: none"
        )


def _check_memory(config: Config, source: str) -> None:
    memory = config.memory
    if memory.residency is not None and memory.slabs != "auto":
        raise ConfigError(
            f"{source}: memory.slabs={memory.slabs} and memory.residency={memory.residency} are both given; "
            f"they say the same thing, keep one"
        )
    if memory.slabs == 0 and memory.pinned_prefix in (0, "auto") and acts_on_forecasts(config):
        raise ConfigError(
            f"{source}: {_listener(config)} acts on forecasts of what slabs should hold, and memory.slabs: 0 "
            "leaves none; write preset: lru, or give slabs"
        )


def _check_backing(config: Config, source: str) -> None:
    memory = config.memory
    if memory.backing == "ram":
        return
    if config.execution.mode == "graph":
        raise ConfigError(
            f"{source}: memory.backing: {memory.backing} with execution.mode: graph is not in this version: "
            "the captured step reads records where they lie in host memory, so all must stay there; write "
            "execution.mode: eager, or memory.backing: ram"
        )
    if memory.packed is True:
        raise ConfigError(
            f"{source}: memory.packed: true is for experts that all lie in host memory, and memory.backing "
            f"is {memory.backing}; write memory.packed: auto, or memory.backing: ram"
        )


def _check_forecasts(config: Config, source: str) -> None:
    predictor, path = config.prediction.predictor, config.prediction.path
    schedule, extra = config.prefetch.schedule, config.prefetch.extra
    if acts_on_forecasts(config) and predictor == "none":
        raise ConfigError(
            f"{source}: {_listener(config)} acts on forecasts, and prediction.predictor: none makes none; "
            "write prediction.predictor: mamba2 or frequency"
        )
    if predictor in TRAINED and not acts_on_forecasts(config):
        raise ConfigError(
            f"{source}: prediction.predictor: {predictor} forecasts, and neither prefetch.schedule: "
            f"{schedule} nor eviction.policy: {config.eviction.policy} listens; write prefetch.schedule: jsd "
            "or eviction.policy: belady, or prediction.predictor: frequency"
        )
    if predictor != "mamba2" and config.prediction.horizon != "auto":
        raise ConfigError(
            f"{source}: prediction.horizon: {config.prediction.horizon} is for prediction.predictor: mamba2, "
            f"and here it is {predictor}; write that, or leave it out"
        )
    if predictor not in TRAINED and path != "auto":
        raise ConfigError(
            f"{source}: prediction.path: {path} names a file, and prediction.predictor: {predictor} reads "
            "none; write prediction.predictor: mamba2 or lookahead_mlp, or leave prediction.path out"
        )
    if extra and not schedules_forecasts(schedule) and config.preset not in ("seqmoe", "vismmoe"):
        raise ConfigError(
            f"{source}: prefetch.extra: {extra} is for schedules that act on forecasts, and "
            f"prefetch.schedule is {schedule}; write prefetch.schedule: jsd, or prefetch.extra: 0"
        )


def _check_pregate(config: Config, source: str) -> None:
    mode, schedule = config.execution.mode, config.prefetch.schedule
    if mode == "eager" or schedule != "top_b" or config.eviction.policy in FORECAST_EVICTIONS:
        raise ConfigError(
            f"{source}: prediction.predictor: pregate looks one layer ahead, inside the captured step, "
            f"for the schedule top_b; here execution.mode: {mode}, prefetch.schedule: {schedule}, "
            f"eviction.policy: {config.eviction.policy}. Write execution.mode: graph, prefetch.schedule: "
            "top_b and eviction.policy: lru"
        )


def _check_foresight_in_graph(config: Config, source: str) -> None:
    predictor, eviction = config.prediction.predictor, config.eviction.policy
    schedule = config.prefetch.schedule
    known_schedule, known_evictions = _FORESIGHT_IN_GRAPH.get(predictor, ("", ()))
    if schedule != known_schedule or eviction not in known_evictions:
        raise ConfigError(
            f"{source}: with execution.mode: graph {_listener(config)} needs all of "
            "prediction.predictor: mamba2, prefetch.schedule: jsd and eviction.policy: belady, or of "
            "lookahead_mlp, top_b and lookahead (or lru, lfu, lfru); here they are "
            f"{predictor}, {schedule}, {eviction}. Write preset: seqmoe or vismmoe alone, or "
            "execution.mode: eager"
        )
    if config.routing.policy != "exact":
        raise ConfigError(
            f"{source}: routing.policy: {config.routing.policy} with forecasts and execution.mode: graph "
            "is not in this version; write routing.policy: exact, or execution.mode: eager"
        )


def _check_speculation(config: Config, source: str) -> None:
    drafter, model, k = config.speculation.drafter, config.speculation.model, config.speculation.k
    if drafter == "autoregressive" and model is None:
        raise ConfigError(
            f"{source}: speculation.drafter: autoregressive needs a small model with the same tokenizer; "
            "name its folder in speculation.model, or write speculation.drafter: prompt_lookup"
        )
    if drafter not in ("autoregressive", "block") and model is not None:
        raise ConfigError(
            f"{source}: speculation.model: {model} is for speculation.drafter: autoregressive or block, and "
            f"the drafter is {drafter}; write one of these, or leave speculation.model out"
        )
    if drafter == "none":
        if k != SpeculationConfig.k:
            raise ConfigError(
                f"{source}: speculation.k: {k} is for a drafter, and speculation.drafter is none; write "
                "speculation.drafter: prompt_lookup, or leave speculation.k out"
            )
        return
    if acts_on_forecasts(config):
        raise ConfigError(
            f"{source}: speculation.drafter: {drafter} with {_listener(config)} is not in this version; "
            "write preset: lru, or speculation.drafter: none"
        )
    if config.execution.mode == "graph":
        _check_drafts_in_graph(config, source)


def _check_drafts_in_graph(config: Config, source: str) -> None:
    drafter, k = config.speculation.drafter, config.speculation.k
    if drafter == "block" or config.routing.policy == "block_selection":
        what = "speculation.drafter: block" if drafter == "block" else "routing.policy: block_selection"
        raise ConfigError(
            f"{source}: {what} with execution.mode: graph is not in this version: the host sees no hidden "
            "states and chooses no experts inside the captured step; write execution.mode: eager"
        )
    if k >= MOST_CHECKED:
        raise ConfigError(
            f"{source}: speculation.k: {k} with execution.mode: graph is too many: a captured step checks "
            f"{MOST_CHECKED - 1} drafted tokens at most; write speculation.k: {MOST_CHECKED - 1}"
        )


def _check_misses(config: Config, source: str) -> None:
    handler, cpu = config.misses.handler, config.cpu
    if handler != "hybrid" and config.misses.cpu_share != "auto":
        raise ConfigError(
            f"{source}: misses.cpu_share: {config.misses.cpu_share} is how misses.handler: hybrid splits, "
            f"and here it is {handler}; write misses.handler: hybrid, or leave misses.cpu_share out"
        )
    if handler != "load" and config.memory.backing != "ram":
        raise ConfigError(
            f"{source}: misses.handler: {handler} computes experts where they lie, in host memory, and with "
            f"memory.backing: {config.memory.backing} they do not lie there; write memory.backing: ram, or "
            "misses.handler: load"
        )
    if handler != "load" and config.routing.policy != "exact":
        raise ConfigError(
            f"{source}: routing.policy: {config.routing.policy} gives text that no timing changes, and with "
            f"misses.handler: {handler} its last bits depend on what is resident; write misses.handler: load"
        )
    if handler == "load" and (cpu.isa != "auto" or cpu.backend != "native"):
        named = f"cpu.isa: {cpu.isa}" if cpu.isa != "auto" else f"cpu.backend: {cpu.backend}"
        raise ConfigError(
            f"{source}: {named} is for experts that the CPU computes, and misses.handler: load computes none "
            "there; write misses.handler: cpu or hybrid, or leave it out"
        )
    if cpu.backend != "native" and cpu.isa != "auto":
        raise ConfigError(
            f"{source}: cpu.isa: {cpu.isa} is for cpu.backend: native, and here it is {cpu.backend}; leave "
            "cpu.isa out"
        )


def _listener(config: Config) -> str:
    """The key and value that act on forecasts."""
    if schedules_forecasts(config.prefetch.schedule):
        return f"prefetch.schedule: {config.prefetch.schedule}"
    return f"eviction.policy: {config.eviction.policy}"
