"""Traces: recorded routing on disk, from which predictors are trained and policies are replayed.

    documents ──tokens──► engine: generate ──► one prefill a document, routers listened to ──► parts ──► file

Importing this face is light; the recorder needs torch and stands in `hetero_runtime.trace.recorder`.
"""

from hetero_runtime.trace.facts import RoutingFacts
from hetero_runtime.trace.file import TraceInfo, read_trace, write_trace

__all__ = ["RoutingFacts", "TraceInfo", "read_trace", "write_trace"]
