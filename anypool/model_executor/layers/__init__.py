"""The building blocks that model files are made of."""
