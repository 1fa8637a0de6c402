"""Training: data, losses, the trainer and its checkpoints."""
