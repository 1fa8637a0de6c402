"""The arrays, the options and the results of a call, as kernels and references take and give them."""
