"""Routed experts: where their bytes are in the checkpoint, the bank that holds them, and what they compute.

`sources` plans, `store` loads, `formats` dequantises, `compute` multiplies. Import what you need from the
module that has it: most of them need torch.
"""
