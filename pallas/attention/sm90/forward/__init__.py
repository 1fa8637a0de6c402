"""The Hopper forward kernel of attention."""
