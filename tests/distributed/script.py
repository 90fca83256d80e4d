"""A program as users write them, without a guard around it: what becomes of its ranks when it ends somehow?"""

import sys
import time

from anypool import LLM

folder, how = sys.argv[1:]
llm = LLM(folder, device="cpu", tensor_parallel_size=2, use_tqdm_on_load=False)
[output] = llm.embed([[1, 20, 30]], use_tqdm=False)
print("ranks", *(process.pid for process in llm.engine._executor._processes._processes.values()), flush=True)  # type: ignore[attr-defined]
if how == "waits":
    time.sleep(300)
