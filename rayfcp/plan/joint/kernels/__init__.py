"""Hot loops of planning, compiled: plain arrays in and out, nothing else. Imported only where a plan is made."""
