"""Dilated attention: its views of the arrays, its launches, and how branches become one result."""
