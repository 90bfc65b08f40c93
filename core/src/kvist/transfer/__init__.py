"""Moving caches between processes: what the bytes mean, who owns them meanwhile, and the built-in transports."""
