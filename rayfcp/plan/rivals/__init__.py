"""What planners of rivals are made of."""
