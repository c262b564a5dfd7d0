"""Every error a user can see.

    HeteroError
    ├── ConfigError        a YAML key, a value or a combination of them
    ├── CheckpointError    a model folder: missing, truncated, wrong dtype, not covered
    ├── BudgetError        what was asked for does not fit; says the smallest change that would
    ├── RequestError       one request: prompt empty or over the context, bad image, bad sampling value
    │   └── RequestCancelled   the request was cancelled or ran past its deadline
    └── DeviceError        the world: no CUDA, a pin quota, out of memory; says what was tried

Each message names the field, the value and the fix. A broken invariant of ours is an `assert`,
never one of these.
"""

from __future__ import annotations


class HeteroError(Exception):
    """Base of all errors that the runtime raises on purpose."""


class ConfigError(HeteroError):
    """A configuration key, value or combination is wrong."""


class CheckpointError(HeteroError):
    """A model folder cannot be read or is not covered."""


class BudgetError(HeteroError):
    """What was asked for does not fit in the memory there is."""


class RequestError(HeteroError):
    """One request cannot be served; the engine goes on serving others."""


class RequestCancelled(RequestError):
    """The request was cancelled or ran past its deadline."""


class DeviceError(HeteroError):
    """The machine refused something: a device, a pin quota, memory."""
