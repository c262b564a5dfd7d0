"""The largest sizes that tables on the device serve; for plans too, so nothing here imports torch."""

from __future__ import annotations

MOST_SLOTS, MOST_EXPERTS, MOST_PAIRS = 8192, 512, 128
"""Slots of all layers, experts of one, (token, k) pairs of a step. One thread block holds a table row in
registers: these are the largest rows that were tried."""
