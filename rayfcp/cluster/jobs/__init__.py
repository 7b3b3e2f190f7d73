"""Runs as jobs of a Ray cluster: what travels there, what is asked for, how a job is followed and stopped."""
