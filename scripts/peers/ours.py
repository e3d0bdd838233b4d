"""jaxpaged's engine in this process: `ours.py OPTIONS`, a JSON object of `LLM`'s arguments."""

import json
import sys
import time
from pathlib import Path

from protocol import Asked, Run, claim_output, serve

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    pipe = claim_output()
    from jaxpaged import LLM, __version__
    from jaxpaged.bench import in_process
    from jaxpaged.bench.workloads import Job

    with LLM(**json.loads(sys.argv[1])) as llm:

        def run(requests: list[Asked]) -> Run:
            jobs = [Job(str(index), request["prompt"], request["max_tokens"]) for index, request in enumerate(requests)]
            began_s = time.perf_counter()
            outcomes = in_process.run(llm.engine, jobs)
            seconds = time.perf_counter() - began_s
            first_s = [outcome.times_s[0] - outcome.sent_s for outcome in outcomes]
            return {"tokens": sum(outcome.num_output for outcome in outcomes), "seconds": seconds, "ttft_s": sum(first_s) / len(first_s)}

        serve(pipe, f"jaxpaged {__version__}", run)


if __name__ == "__main__":
    main()
