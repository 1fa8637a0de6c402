"""Scripts in processes of their own, and the memory of a process of tests."""
