"""Elastic decisions: pure functions of facts, time included, that say what to do and why."""
