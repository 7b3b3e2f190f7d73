"""What a run tells: step log, Prometheus endpoint, trace, report page, summary and progress."""
