"""The example routers between a server and workers that only say who they are: see scripts/router-check."""

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BIN = sys.argv[1]
CAPTURE = "tests/data/sglang-plain-small"
PAGE_SIZE = 16


def worker():
    """Starts a worker that answers with its own URL, and tokenizes a text to the numbers in it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                answer = {"tokens": [int(word) for word in body["prompt"].split()]}
            else:
                answer = {"worker": url, "path": self.path, "length": len(body["prompt"])}
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return url


@contextlib.contextmanager
def process(*command, says, **variables):
    """A process, and what its output says by a pattern; ended with the block."""
    running = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    try:
        for line in running.stdout:
            lines.append(line)
            if found := re.search(says, line):
                break
        else:
            sys.exit(f"{command} ended: {''.join(lines)}")
        # Reads on, so that it never waits for a full pipe.
        threading.Thread(target=lambda: [None for _ in running.stdout], daemon=True).start()
        yield running, found.group(1)
    finally:
        running.kill()
        running.wait()


def ask(router, prompt):
    body = json.dumps({"model": "any", "prompt": prompt}).encode()
    request = urllib.request.Request(f"http://{router}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def check(name, router_command, index_of):
    workers = [worker(), worker()]
    with process(
        f"{BIN}/kv-indexer-server",
        says=r"listening address=([0-9.:]+)",
        KV_INDEXER_LISTEN_ADDR="127.0.0.1:0",
        KV_INDEXER_HTTP_ADDR="127.0.0.1:0",
    ) as (server_process, server):
        # Only the second worker holds what was recorded.
        replay = [f"{BIN}/kv-indexer", "replay", f"{CAPTURE}.jsonl.gz", "--server", f"http://{server}"]
        subprocess.run([*replay, "--worker", "w1", "--address", workers[1]], check=True, stdout=subprocess.DEVNULL)
        with gzip.open(f"{CAPTURE}.expected.json.gz") as file:
            queries = json.load(file)["queries"]
        command = [*router_command, index_of(server), str(PAGE_SIZE), *workers]
        with process(*command, says=r"listening on ([0-9.:]+)") as (_, router):
            held = 0
            for query in queries:
                if query.get("tokens") and query["events_prefix"]["GPU"] > 0:
                    answer = ask(router, query["tokens"])
                    assert answer["worker"] == workers[1], (name, query, answer)
                    assert answer == {**answer, "path": "/v1/completions", "length": len(query["tokens"])}
                    held += 1
            assert held > 10, held
            # A text goes the same way once it is tokens.
            text = " ".join(str(token) for token in query_with_match(queries)["tokens"])
            assert ask(router, text)["worker"] == workers[1], name
            unknown = {ask(router, [7 * number] * 64)["worker"] for number in range(6)}
            assert unknown == set(workers), (name, unknown)
            server_process.kill()
            server_process.wait()
            alone = {ask(router, query_with_match(queries)["tokens"])["worker"] for _ in range(6)}
            assert alone == set(workers), (name, alone)
    print(f"{name}: {held} recorded prompts to the worker that holds them; without an index by turns")


def query_with_match(queries):
    return next(query for query in queries if query.get("tokens") and query["events_prefix"]["GPU"] > 3)


check("rust", [f"{BIN}/examples/router", "127.0.0.1:0"], lambda server: f"http://{server}")
check("python", [sys.executable, "examples/python/router.py", "0"], lambda server: server)
