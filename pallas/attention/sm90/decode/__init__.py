"""The Hopper kernel of attention to a cache of keys and values."""
