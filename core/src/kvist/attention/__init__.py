"""Attention: the backend contract, the inputs of each family the core ships, and its backends."""
