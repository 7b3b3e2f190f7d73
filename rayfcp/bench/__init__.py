"""Measurements on one device, without Ray: attention of all ranks of a plan, and a device's own profile."""
