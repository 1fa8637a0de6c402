"""Attention functions with the interfaces of other training libraries: MaxText and Levanter.

They import neither library: install the library that you train with.
"""

from jax_kernels.adapters import levanter as levanter
from jax_kernels.adapters import maxtext as maxtext
