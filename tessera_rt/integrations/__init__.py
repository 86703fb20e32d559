"""Tessera inside other libraries: Hugging Face models (``hf``), checkpoints of other runtimes (``converters``)."""
