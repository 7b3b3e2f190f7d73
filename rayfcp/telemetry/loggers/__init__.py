"""Loggers for other dashboards, each through its own package: a small file each, loaded only where it is asked for."""
