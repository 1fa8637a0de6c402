"""Calls with sizes and options drawn at random."""
