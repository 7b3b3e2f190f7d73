"""Who encodes which pictures, and what that takes."""
