"""What transformers writes to the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging


def keep_quiet() -> None:
    """For commands that draw a terminal of their own: no bars, and only errors, from transformers."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def without_bars() -> Iterator[None]:
    """No bar of transformers inside; after it whatever the user had."""
    had_bars, hub_had_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()  # the hub's with them
            if not hub_had_bars:
                disable_progress_bars()
