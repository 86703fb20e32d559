"""The command line, ``tessera``."""

from tessera_rt.cli.app import main

__all__ = ["main"]
