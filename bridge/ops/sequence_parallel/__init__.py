"""Attention over a sequence that the processes of a torch.distributed group share."""
