"""Compiled loops of the block planner. Arrays in, arrays out; imported where a plan is made."""
