"""What operators look at: `kvist top` in a terminal, `kvist report` as a page."""
