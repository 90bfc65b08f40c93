"""Other cache managers, each driven inside an environment of its own."""
