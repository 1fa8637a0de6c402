"""One file per op: its signature, its checks, its gradient and its table of implementations."""
