"""Stand-ins for hardware."""
