"""Reading Hugging Face safetensors folders: headers, entries, lazy tensors. Nothing here loads a weight.

`safetensors_file` and `checkpoint` import in milliseconds (no torch), so that the memory plan can use
them; `lazy_tensor` needs torch.
"""

from hetero_runtime.checkpoint.checkpoint import Checkpoint
from hetero_runtime.checkpoint.safetensors_file import TensorEntry, read_header

__all__ = ["Checkpoint", "TensorEntry", "read_header"]
