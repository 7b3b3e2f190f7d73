"""Recurrent layers over ranks: linear recurrences with gates and delta rules, and causal convolutions."""
