"""Tessera: pipeline- and expert-parallel training of mixture-of-experts models, planned together with its overlap."""

__version__ = "0.1.0"
