"""What runs in a side's own process.

These files run in the environments of other engines, where there is no anypool: each needs nothing but Python and the
engine it drives, they know each other by relative imports, and what they import of an engine is imported in `load`.
"""
