"""Calibrations: what held-out text says of a model's routers, for routing policies (PSR §4.1, Appendix B) and
for what prompts fetch ahead (SeqMoE §8.4).

The face is light: a configuration asks where a calibration lies and whose it is without torch. Measuring one
needs the model and stands in `hetero_runtime.calibration.measure`.
"""

from __future__ import annotations

from hetero_runtime.calibration.file import StoredCalibration, read_calibration, write_calibration
from hetero_runtime.calibration.locate import CALIBRATION_SUFFIX, locate_calibration, locate_profile

__all__ = [
    "CALIBRATION_SUFFIX",
    "StoredCalibration",
    "locate_calibration",
    "locate_profile",
    "read_calibration",
    "write_calibration",
]
