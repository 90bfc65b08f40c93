"""Memory: the arena's bookkeeping (no torch) and the device storage behind it (torch)."""
