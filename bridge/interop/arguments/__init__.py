"""Tensors and numbers that a call gets: DTensors, a learned scale, numeric options, and autocast's dtype."""
