"""How often prompts use each expert, as a calibration's text says."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.calibration.file import CALIBRATE, read_calibration
from hetero_runtime.config.tree import PrefetchConfig
from hetero_runtime.errors import CheckpointError
from hetero_scheduler import Popularity


def profiled_popularity(
    config: PrefetchConfig, *, num_layers: int, num_experts: int, top_k: int
) -> Popularity:
    """Counts that begin with the profile that `config` names, or with nothing where it names none.

    What auto means, `locate_profile` has decided. Raises CheckpointError for a file that saw no text or does
    not read.
    """
    if config.popularity == "none":
        return Popularity(num_layers, num_experts)
    uses = read_calibration(Path(config.popularity)).calibration.uses
    try:
        return Popularity.profiled(uses, top_k=top_k)
    except ValueError as error:
        raise CheckpointError(f"{config.popularity}: {error}; {CALIBRATE}") from error
