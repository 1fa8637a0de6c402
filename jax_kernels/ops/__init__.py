"""A file or folder for each op: its signature, its checks, its gradient and its table of implementations."""
