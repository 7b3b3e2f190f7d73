"""`rayfcp compare`: every strategy on the same batches, planned, checked and simulated, without a cluster.

`rayfcp.compare.comparison.compare(inputs)` is the way in from Python. This module imports nothing, so that the
command line knows its arguments without loading numpy.
"""
