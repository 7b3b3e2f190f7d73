"""Proof that a plan and its programs do what a single process would do, and can be run. Off the training path."""

from rayfcp.verify.plan import check_plan, check_programs

__all__ = ["check_plan", "check_programs"]
