"""What vectors and an index over them take, in bytes."""

from __future__ import annotations

# Links of each vector on the lowest level of an HNSW graph are twice this.
HNSW_LINKS = 32
PQ_CODE = 64
_ID = 8

_BITS = {"float32": 32, "float16": 16, "int8": 8, "binary": 1}


def vector_bytes(count: int, dimensions: int) -> dict[str, int]:
    """Bytes of the vectors by precision; a binary vector is a whole number of bytes."""
    return {name: count * -(-dimensions * bits // 8) for name, bits in _BITS.items()}


def index_bytes(count: int, dimensions: int) -> dict[str, int]:
    """Bytes of an index in memory, its vectors included, by its kind as Faiss names it.

    Per vector: 4 d for floats, d for eight bits, 2 M links of 4 bytes for HNSW, and the code and an id of 8 bytes for
    inverted lists of product codes (Faiss, "Guidelines to choose an index").
    """
    links = 2 * HNSW_LINKS * 4
    sizes = {
        "Flat": 4 * dimensions,
        f"HNSW{HNSW_LINKS}": 4 * dimensions + links,
        f"HNSW{HNSW_LINKS}_SQ8": dimensions + links,
        f"IVF,PQ{PQ_CODE}": PQ_CODE + _ID,
        "BFlat": -(-dimensions // 8),
    }
    return {name: count * size for name, size in sizes.items()}
