"""Optional packages, and the extras of this library that install them."""

import importlib.util
import sys

__all__ = ["EXTRAS", "is_installed", "require"]

# By package.
EXTRAS = {
    "filelock": "flax",
    "flax": "flax",
    "grain": "flax",
    "matplotlib": "cli",
    "optax": "flax",
    "orbax": "flax",
    "platformdirs": "cli",
    "rich": "cli",
    "torch": "torch",
    "transformers": "hf",
    "typer": "cli",
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported. It is not imported."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def require(package: str, by: str, extra: str | None = None) -> None:
    """Raises ModuleNotFoundError, which says how to install the package, if an optional package is not installed.

    by: the name that needs it. extra: None for the package's own.
    """
    if not is_installed(package):
        hint = f"pip install 'jax-kernels[{extra or EXTRAS[package]}]'"
        raise ModuleNotFoundError(f"{by} needs the package {package}: {hint}", name=package)
