"""What GPT-OSS keeps, and attention over it: an example of a plugin for Kvist."""
