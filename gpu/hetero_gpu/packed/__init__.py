"""bf16 records in three quarters of their bytes, without the loss of a bit: less to keep, less to move.

layout.py     where the parts of a packed record lie: arithmetic alone, for plans too
reference.py  packing and unpacking as one would write them down
pack.py       packing on the host's cores
decode.py     unpacking on the device
copier.py     packed copies for the copy engine: link, then decode, then slab

The layout is imported here, the rest from its module: those need numba or torch.
"""

from __future__ import annotations

from hetero_gpu.packed.layout import PackedLayout

__all__ = ["PackedLayout"]
