"""chunktune: choose the chunk count of a pipeline-parallel training step by running the real pipeline."""

__version__ = "0.1.0"
