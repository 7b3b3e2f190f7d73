"""Recurrent layers over ranks: linear recurrences with gates and delta rules, and causal convolutions."""

from rayfcp.execute.recurrence.convolution import causal_convolution
from rayfcp.execute.recurrence.function import linear_recurrence

__all__ = ["causal_convolution", "linear_recurrence"]
