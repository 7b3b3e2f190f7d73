"""`rayfcp doctor`: check that a machine or cluster is ready for a run, and how to fix what is not.

Facts are gathered first (`gather`), then judged by pure checks (`checks`).
"""
