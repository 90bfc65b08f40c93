"""What a cache did in each step and how long each request took, recorded while it runs; one JSON line per record."""
