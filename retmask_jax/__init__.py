"""RetMask on JAX: detect retrieval heads, sample with and without them, train on the contrast."""

__version__ = "0.1.0"
