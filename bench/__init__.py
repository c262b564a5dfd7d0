"""Benchmarks, the script that trains the bundled model, and committed results. Not part of the wheel."""
