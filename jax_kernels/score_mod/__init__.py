"""A function of the scores: its trace, the axes along which its values vary, and its form on a tile of scores."""
