"""Deterministic simulation of the control code: real controller, virtual clock, simulated workers, injected faults.

`python -m tests.simulated --seed N` replays one schedule event by event.
"""
