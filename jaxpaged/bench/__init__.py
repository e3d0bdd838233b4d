"""Benchmarks behind `jaxpaged bench`: seeded workloads, the ways to run them, and the figures in vLLM's names.

* `workloads.py`: which requests, and when they come; the same ids for every engine.
* `outcomes.py`: what became of each request, and the figures of them all (keys of `vllm bench serve`).
* `http_load.py`: sends a workload to an OpenAI server.
* `in_process.py`: runs a workload through `LLM`: throughput and latency.
* `static_batches.py`: static against continuous batching.
* `startup.py`: a start, phase by phase.
* `floor.py`: what this machine could do at best.
"""
