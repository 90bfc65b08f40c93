"""Tiers below the device: what they hold, what moves between them, what a sequence can take back from them."""
