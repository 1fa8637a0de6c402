"""flash_attention, and the ops that are built on it."""
