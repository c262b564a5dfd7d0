"""Evaluation by the function that serves: what a configuration does to what the model says.

    texts ─► rows ─► Harness (batched full forwards, one request a row) ─► scores ─┬─► Perplexity
                                                                                   └─► Divergence, tasks
    per-question results of two configurations ─► comparison

Importing this face is light; the harness needs torch and stands in `hetero_runtime.evaluation.harness`.
"""

from hetero_runtime.evaluation.base import Estimate, RowScore, TokenIds, TokensSeen, clustered_mean
from hetero_runtime.evaluation.perplexity import Perplexity

__all__ = ["Estimate", "Perplexity", "RowScore", "TokenIds", "TokensSeen", "clustered_mean"]
