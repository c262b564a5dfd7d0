"""Which device `auto` is, and what unified memory can do in this version."""

from __future__ import annotations

from hetero_runtime.config.tree import Config, Device, slabs_are_bank
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan.hardware import Hardware


def choose_device(config: Config, hardware: Hardware) -> Device:
    """The device that `config` means on `hardware`. Raises ConfigError for one that it does not have."""
    if config.device == "cpu" or (config.device == "auto" and hardware.gpu is None):
        return "cpu"
    if hardware.gpu is None:
        raise ConfigError(
            f"device: {config.device} was asked for, but {hardware.no_gpu_reason or 'there is no GPU'}; "
            f"write device: cpu, or run `hetero-runtime doctor` to see what is missing"
        )
    if config.device == "unified" and not hardware.gpu.maps_host_memory:
        raise ConfigError(
            f"device: unified was asked for, but {hardware.gpu.name} cannot read host memory where it lies; "
            "write device: cuda"
        )
    if config.device == "auto":
        return "unified" if hardware.gpu.is_integrated else "cuda"
    return config.device


def check_unified(config: Config, device: Device) -> None:
    """Raise ConfigError for what unified memory has no use for, or not yet."""
    if device != "unified":
        return
    if config.execution.mode == "graph":
        raise ConfigError(
            "execution.mode: graph with device: unified is not in this version; write execution.mode: eager, "
            "or device: cuda"
        )
    if config.memory.packed is True:
        raise ConfigError(
            "memory.packed: true saves bytes on the way to a device, and with device: unified nothing is on "
            "the way; write memory.packed: auto"
        )
    if config.misses.handler != "load" and slabs_are_bank(device, config.memory.backing):
        raise ConfigError(
            f"misses.handler: {config.misses.handler} computes what the GPU does not have, and with device: "
            "unified and memory.backing: ram it has all experts; write misses.handler: load"
        )
