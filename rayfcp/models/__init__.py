"""Hugging Face causal language models: shape, attention hook, first weights, sharding, export."""
