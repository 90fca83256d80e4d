"""Many texts through a model: files in, vectors on the disk, in memory that does not grow.

`sources` and `readers` read files in blocks; `stream` runs them, the next being tokenised meanwhile; `job` writes parts
and a log of them, so that a run that was killed goes on where it stopped, and `merging` makes one file of the parts.
"""
