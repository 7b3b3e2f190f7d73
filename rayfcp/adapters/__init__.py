"""Interfaces between rayfcp's planner and other trainers: a module for each. Import the one that you need."""
