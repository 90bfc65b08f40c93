"""States of gated delta nets: an example of a plugin for Kvist."""
