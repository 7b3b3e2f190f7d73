"""Loggers for experiment trackers: one small file each, loaded only when configured."""
