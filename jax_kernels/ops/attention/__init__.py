"""flash_attention, and the ops that are made of it."""
