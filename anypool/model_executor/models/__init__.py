"""Architectures: one short file per family over shared blocks, and transformers' own modules for all others."""
