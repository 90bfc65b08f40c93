"""Run the cache manager alone on a request trace: no weights, no GPU. This is how an operator sizes a cache."""
