"""Ray's workers as forks of one process that has imported what they use; see `cluster`."""
