"""A function of the scores: its trace, the axes along which its numbers differ, and its form on a tile of scores."""
