"""Dilated attention: its views of the arrays, its launches, and the merge of its branches."""
