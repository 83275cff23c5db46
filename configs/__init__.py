"""One ml_collections config a model."""
