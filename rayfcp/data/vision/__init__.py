"""Pictures of rows: their sizes, their places among the tokens, their patches."""
