"""Ring attention of a sequence that is sharded over several devices."""
