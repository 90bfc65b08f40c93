"""Grouped-query attention on CPUs over Kvist's paged KV cache, in C that the machine's own compiler has built."""
