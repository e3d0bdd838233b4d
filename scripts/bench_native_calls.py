"""Times native calls on text of a client's size, and how long each keeps other threads from running.

    python scripts/bench_native_calls.py MODEL [--megabytes 1]

MODEL is what `--model` takes; only its tokenizer is read. A thread counts milliseconds beside each call: the longest time in which it did
not come to run, over that of doing nothing, is what the call held the interpreter lock for. The last line is JSON.
"""

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import ModelConfig
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.loading.sources import resolve
from jaxpaged.tokenizer import Tokenizer


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the call, and the longest gap in which another thread did not run meanwhile."""
    gaps, is_over = [0.0], threading.Event()

    def count() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=count)
    watcher.start()
    time.sleep(0.02)
    gaps.clear()
    start = time.perf_counter()
    call()
    took = time.perf_counter() - start
    is_over.set()
    watcher.join()
    return took, max(gaps, default=0.0)


def calls_of(tokenizer: Tokenizer, text: str) -> dict[str, Callable[[], object]]:
    """The native calls that see what a client sends or what is sent to it."""
    ids = tokenizer.encode(text)
    backend = tokenizer._backend
    body = msgspec.json.encode({"messages": [{"role": "user", "content": text}]})
    messages = [{"role": "user", "content": text}]
    stops = [f"no such text {index}" for index in range(64)]

    def detokenize(stop: list[str]) -> None:
        detokenizer = Detokenizer(tokenizer, stop=stop)
        for token_id in ids:
            detokenizer.append((token_id,))

    return {
        "nothing (0.2 s of sleep)": lambda: time.sleep(0.2),
        "tokenizers encode, which we do not call": lambda: backend.encode(text),
        "tokenizers encode_batch": lambda: tokenizer.encode(text),
        "tokenizers decode, which we do not call for answers": lambda: backend.decode(ids),
        "detokenizer, id by id": lambda: detokenize([]),
        "detokenizer with 64 stop strings": lambda: detokenize(stops),
        "chat template and tokens": lambda: tokenizer.apply_chat_template(messages),
        "msgspec reads the body": lambda: msgspec.json.decode(body),
        "msgspec writes the body": lambda: msgspec.json.encode(messages),
        "json reads the body, which we do not call": lambda: json.loads(body),
        "str.encode": lambda: text.encode(),
        "regular expression over the text": lambda: re.findall(r"<\|[^|]*\|>", text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_files(resolve(ModelConfig(model=args.model)))
    sentence = "The quick brown fox, 12 times <|over|> the lazy dog; and naïve cafés in 東京. "
    text = sentence * int(args.megabytes * 1e6 / len(sentence.encode()))
    sys.setswitchinterval(0.005)
    record = {}
    for name, call in calls_of(tokenizer, text).items():
        took, gap = min(measure(call) for _ in range(args.rounds))
        record[name] = {"ms": took * 1e3, "longest_gap_ms": gap * 1e3}
        print(f"{name:52} {took * 1e3:8.1f} ms, others waited up to {gap * 1e3:7.1f} ms")
    print(json.dumps({"benchmark": "native_calls", "megabytes": args.megabytes, "calls": record}))


if __name__ == "__main__":
    main()
