"""The jaxprs inside the equations of a jaxpr."""

from jax._src.core import jaxprs_in_params  # no public function lists the jaxprs in an equation

__all__ = ["jaxprs_in_params"]
