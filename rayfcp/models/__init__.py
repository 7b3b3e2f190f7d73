"""Hugging Face causal language models: shape, attention hook, first weights, sharding, export.

Import from the modules: `describe` needs no torch, the others do.
"""
