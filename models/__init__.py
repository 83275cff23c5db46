"""Decoder families in flax nnx. Imports nothing from the stages."""
