"""PNG pictures, drawn without a display; matplotlib is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_runtime.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty one of `size`, width and height in inches. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'hetero-runtime[plot]', or leave out --plot"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write the PNG `path`. Raises DeviceError where it cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise DeviceError(f"{path}: the picture cannot be written ({error}); name another file") from error
