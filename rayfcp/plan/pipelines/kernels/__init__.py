"""Compiled loops over passes."""
