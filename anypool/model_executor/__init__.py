"""Backbones on packed tokens, their configuration and weights, and the runner."""
