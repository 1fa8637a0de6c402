"""Programs that CONTRIBUTING.md has people run."""
