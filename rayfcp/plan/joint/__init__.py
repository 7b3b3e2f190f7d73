"""The joint search and the paper's two stages."""
