"""Expert files: every routed expert of a model in one file, each record readable with one direct read.

`ExpertFile` reads one; `pack` writes one. What lies where in it: `header`. Import `pack` from its module: it
needs transformers.
"""

from hetero_runtime.expert_file.reader import ExpertFile

__all__ = ["ExpertFile"]
