"""Blocks that lie anywhere, and rounds without congestion (FCP with blocks, Zhao et al.).

The distributor places blocks, the communication planner makes rounds of what must travel. Compiled: import
it where a plan is made, not where names are listed.
"""
