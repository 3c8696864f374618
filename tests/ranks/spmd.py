"""What torchrun starts in test_torchrun.py and test_hosts.py: every rank runs all of it, prints one line of JSON.

spmd.py MODEL SIZE same | differ | lost
"""

from __future__ import annotations

import json
import os
import signal
import sys

from nanovllm import LLM, EngineDeadError, SamplingParams
from tests.ranks.processes import listening


def main() -> None:
    model, size, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 64, "max_num_batched_tokens": 64}
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True),  # seeded by the engine
    ]
    prompts = [{"prompt_token_ids": [5, 6, 7 + number] * (1 + number * 3)} for number in range(8)]
    found: dict = {"rank": rank, "tokens": [], "errors": []}
    limit = 3.0 if what == "lost" else 60.0  # on a busy machine a rank that is well may be slow
    for seed in (1, 2):  # one engine after the other
        with LLM(model, tensor_parallel_size=size, worker_timeout=limit, seed=seed, **options) as llm:
            found["executor"] = type(llm.engine.executor).__name__
            found["listening"] = sorted(listening(os.getpid()))
            if what == "differ" and rank == 1:
                prompts[3] = {"prompt_token_ids": [1, 2, 3]}
            if what == "lost" and rank == 1:
                os.kill(os.getppid(), signal.SIGSTOP)  # torchrun, which has the store, as when the whole machine hangs
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                for one in params:
                    outputs = llm.generate(prompts, one, use_tqdm=False)
                    found["tokens"].append([output.outputs[0].token_ids for output in outputs])
                    found["errors"] += [output.error for output in outputs if output.error]
            except EngineDeadError as error:
                found["died"] = str(error)
                break
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())  # at once: another rank writes to the same pipe


if __name__ == "__main__":
    main()
