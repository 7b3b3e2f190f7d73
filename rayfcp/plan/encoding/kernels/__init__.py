"""Compiled loops over pictures."""
