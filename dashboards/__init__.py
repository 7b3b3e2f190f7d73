"""Dashboards of runs, for operators: Grafana boards, Prometheus's configuration, recording rules and alerts.

Imports nothing of the package: metrics are known by their names alone, and a test holds these against its own list.
"""
