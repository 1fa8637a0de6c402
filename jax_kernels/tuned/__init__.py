"""The results of tuning, which dispatch reads: the winner of each tuned call, in files of the user's cache folder."""
