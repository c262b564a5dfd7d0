"""The predictor on the device, for a decode step captured as one CUDA graph.

forecasts = host.prefill(prompt)                               outside the graph
predictor.load(row, host.states(), forecasts=forecasts)
── captured ──
predictor.observe(l, router_logits)     of each layer; at a group's last one its forecast is made
others read predictor.probabilities     [rows, horizon, layers, experts], from the step after that on
──
host.restore(predictor.export(row))     and back

`lookahead` is the other one: VisMMOE's, which speaks at every layer of the layers that follow in its step.
"""

from __future__ import annotations

from hetero_gpu.predict.predictor import DevicePredictor

__all__ = ["DevicePredictor"]
