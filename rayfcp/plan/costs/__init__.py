"""What plans cost: groups, layouts, memory."""
