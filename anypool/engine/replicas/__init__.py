"""Replicas: engines in processes of their own, behind one queue.

`front.py` takes and queues requests, as any engine does, and hands batches to whichever replica has least to do.
`replica.py` is one of them as the front sees it: what it is running, and its life from start to restart. `process.py`
starts its process, `worker.py` is what runs in there, and `wire.py` what the two say to each other.
"""

from anypool.engine.replicas.front import Replicas, start_engine

__all__ = ["Replicas", "start_engine"]
