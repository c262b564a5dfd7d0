"""`execution.mode: auto`: a captured step wherever one can be, else eager passes.

What speaks against a captured step is asked, not listed again: the checks that refuse `graph` where it stands
by name, what `plan.captured` says of model, machine and slabs, and whether it fits beside everything else.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from hetero_runtime.config.combinations import check_combinations, check_mode
from hetero_runtime.config.resolution import resolve
from hetero_runtime.config.tree import Config, Mode
from hetero_runtime.config.unified import choose_device
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.plan.captured import why_not_captured
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware
from hetero_runtime.plan.planner import make_plan

_SOURCE = "configuration"
_FIX = re.compile(r"(; write |\. Write | What fits: ).*")
"""How a message goes on when it has said what is wrong."""


class Settled(NamedTuple):
    """A configuration whose mode is decided."""

    config: Config
    why_eager: str | None = None
    """Why `auto` is eager on a GPU, in a sentence; None where it is not, or somebody said so."""


def settle_mode(config: Config, hardware: Hardware, geometry: Geometry) -> Settled:
    """`config` with a mode by name. Pure. Raises ConfigError where only a captured step could do what is
    asked, and there can be none."""
    if config.execution.mode != "auto":
        return Settled(config)
    if choose_device(config, hardware) == "cpu":
        eager, why = in_mode(config, "eager"), None
    else:
        captured, eager = in_mode(config, "graph"), in_mode(config, "eager")
        why = _why_not(captured, hardware, geometry)
        if why is None:
            return Settled(captured)
    try:
        check_mode(eager, _SOURCE)
    except ConfigError as error:
        raise error if why is None else ConfigError(f"{error} (here that cannot be: {why})") from error
    return Settled(eager, why)


def in_mode(config: Config, mode: Mode) -> Config:
    """`config` with `execution.mode` as given."""
    return replace(config, execution=replace(config.execution, mode=mode))


def eager_unless_named(config: Config) -> Config:
    """`config` for what is driven pass by pass: `auto` is eager."""
    return in_mode(config, "eager") if config.execution.mode == "auto" else config


def _why_not(captured: Config, hardware: Hardware, geometry: Geometry) -> str | None:
    """Why a step of `captured` cannot be, without the fix that is told to whoever asked for it by name."""
    try:
        check_combinations(captured, _SOURCE)
        resolved = resolve(captured, hardware, geometry)
        make_plan(geometry, resolved, hardware)
    except (ConfigError, BudgetError) as error:
        return _FIX.sub("", str(error).removeprefix(f"{_SOURCE}: "))
    return why_not_captured(geometry, resolved, hardware)
