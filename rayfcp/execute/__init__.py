"""Runs rank programs with torch: distributed attention, sharding, optimizer, checkpoints, devices."""
