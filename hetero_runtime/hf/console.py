"""What transformers writes to the terminal."""

from __future__ import annotations

from transformers.utils import logging


def keep_quiet() -> None:
    """For commands that draw a terminal of their own: no bars, and only errors, from transformers."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
