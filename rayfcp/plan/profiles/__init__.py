"""Models and machines, as files say and as they were measured."""
