"""Elastic decisions: pure functions of facts, time included, that return what to do and why."""
