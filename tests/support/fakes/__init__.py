"""Fake hardware."""
