"""llama.cpp's own server with 16 slots: `llama_server.py SERVER MODEL.gguf THREADS`."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time

from protocol import Asked, Run, claim_output, serve

SLOTS = 16
SLOT_TOKENS = 1024
START_LIMIT_S = 60


class LlamaServer:
    """A started server; it ends with this process."""

    def __init__(self, program: str, model: str, threads: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        sizes = ["-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "-t", threads, "-tb", threads]
        # What was fastest here: one cache for all slots on mixed16, flash attention everywhere; continuous batching is its default.
        sizes += ["-kvu", "-fa", "on", "-cb"]
        self.process = subprocess.Popen([program, "-m", model, "--host", "127.0.0.1", "--port", str(self.port), *sizes], stdout=sys.stderr)
        deadline_s = time.monotonic() + START_LIMIT_S
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("llama-server did not start")
            time.sleep(0.02)

    def run(self, requests: list[Asked]) -> Run:
        """See `protocol`."""
        began_s = time.perf_counter()
        done: list[tuple[int, float]] = []
        threads = [threading.Thread(target=self._one, args=(request, began_s, done)) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began_s
        if len(done) != len(requests):
            raise SystemExit(f"{len(requests) - len(done)} requests failed")
        return {"tokens": sum(tokens for tokens, _ in done), "seconds": seconds, "ttft_s": sum(first for _, first in done) / len(done)}

    def _one(self, request: Asked, began_s: float, done: list[tuple[int, float]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        greedy = {"temperature": 0, "top_k": 1, "ignore_eos": True, "stream": True, "cache_prompt": True}
        body = {"prompt": request["prompt"], "n_predict": request["max_tokens"], **greedy}
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        first_s = None
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                first_s = first_s or time.perf_counter() - began_s
                if event.get("stop"):
                    done.append((event["tokens_predicted"], first_s))
                    break
        connection.close()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def main() -> None:
    pipe = claim_output()
    program, model, threads = sys.argv[1:]
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = next((line for line in (told.stderr + told.stdout).splitlines() if line.startswith("version")), "version unknown")
    server = LlamaServer(program, model, threads)
    try:
        serve(pipe, f"llama.cpp {version.removeprefix('version: ')}", server.run)
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
