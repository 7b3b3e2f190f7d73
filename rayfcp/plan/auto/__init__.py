"""`auto`: of all strategies' plans of a batch the fastest, and mixtures of them."""
