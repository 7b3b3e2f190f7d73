"""Elastic pipeline parallelism (InfiniPipe, Wang et al., 2025): chunks, order of passes, recomputation, grouping."""
