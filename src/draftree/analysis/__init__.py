"""Analysis: closed forms and readers of records; independent of torch."""

from draftree.analysis.trace import Trace

__all__ = ["Trace"]
