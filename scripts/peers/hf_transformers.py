"""Hugging Face transformers: `hf_transformers.py MODEL DTYPE THREADS static|continuous`.

Static is one batch, padded on the left, that runs until the longest answer is whole; only tokens that somebody asked for are counted.
"""

import os
import sys
import time

from protocol import Asked, Run, claim_output, serve

END_ID = 2
RESULT_LIMIT_S = 600


def main() -> None:
    pipe = claim_output()
    model_folder, dtype, threads, kind = sys.argv[1:]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)).eval()

    class FirstStep(transformers.LogitsProcessor):
        """Notes when the first logits were there."""

        def __init__(self) -> None:
            self.at_s = 0.0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.at_s = self.at_s or time.perf_counter()
            return scores

    def static(requests: list[Asked]) -> Run:
        width = max(len(request["prompt"]) for request in requests)
        length = max(request["max_tokens"] for request in requests)
        ids = torch.full((len(requests), width), END_ID)
        mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        first = FirstStep()
        began_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                min_new_tokens=length,
                max_new_tokens=length,
                do_sample=False,
                logits_processor=transformers.LogitsProcessorList([first]),
                pad_token_id=END_ID,
                eos_token_id=None,
            )
        seconds = time.perf_counter() - began_s
        return {"tokens": sum(request["max_tokens"] for request in requests), "seconds": seconds, "ttft_s": first.at_s - began_s}

    def continuous(requests: list[Asked]) -> Run:
        longest = max(request["max_tokens"] for request in requests)
        generation = transformers.GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=END_ID)
        batching = transformers.ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512, use_cuda_graph=False)
        began_s = time.perf_counter()
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        manager.start()
        for index, request in enumerate(requests):
            manager.add_request(request["prompt"], request_id=str(index), max_new_tokens=request["max_tokens"], streaming=True)
        first_s: dict[str, float] = {}
        num_done = num_tokens = 0
        while num_done < len(requests):
            output = manager.get_result(timeout=1)
            now_s = time.perf_counter() - began_s
            if output is None:
                if not manager.is_running() or now_s > RESULT_LIMIT_S:
                    raise SystemExit("continuous batching stopped")
                continue
            if output.generated_tokens:
                first_s.setdefault(output.request_id, now_s)
            if output.is_finished():
                num_done, num_tokens = num_done + 1, num_tokens + len(output.generated_tokens)
        seconds = time.perf_counter() - began_s
        manager.stop(block=True)
        return {"tokens": num_tokens, "seconds": seconds, "ttft_s": sum(first_s.values()) / len(first_s)}

    serve(pipe, f"transformers {transformers.__version__} {kind}", {"static": static, "continuous": continuous}[kind])


if __name__ == "__main__":
    main()
