"""A router of OpenAI-style requests to the worker with the least prefill left to do.

    python router.py LISTEN_PORT INDEX PAGE_SIZE WORKER...

e.g. `8000 localhost:50051 16 http://10.0.0.1:30000 http://10.0.0.2:30000`: SGLang workers
under the URLs that their bridges report. It does what examples/router.rs does, with
grpcio and the standard library; the README beside it says how to generate the stubs.
"""

import hashlib
import http.client
import json
import struct
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc

import kv_indexer_pb2
import kv_indexer_pb2_grpc

DEADLINE_SECONDS = 0.1
IN_FLIGHT_MAX = 32
# As many as a message of 8 MiB holds, beside its own few bytes.
HASHES_MAX = (8 * 1024 * 1024 - 16) // 8
BODY_BYTES_MAX = 16 * 1024 * 1024

# Codes that mean "route by load"; any other is a disagreement about the contract.
FALLS_BACK = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
}


def block_hashes(tokens, page_size):
    """Hashes of a prompt's whole blocks, as SGLang computes them for ids of 32 bits."""
    digest, hashes = b"", []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        digest = hashlib.sha256(digest + page).digest()
        hashes.append(int.from_bytes(digest[:8], "big", signed=True))
    return hashes


class Router:
    def __init__(self, index, page_size, workers):
        # A prompt of a million blocks is 8 MiB; an answer grows with the workers.
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", 8 * 1024 * 1024)]
        self.index = kv_indexer_pb2_grpc.KVIndexerStub(grpc.insecure_channel(index, options))
        self.permits = threading.BoundedSemaphore(IN_FLIGHT_MAX)
        self.page_size = page_size
        # Blocks that requests without an answer still have to prefill, by worker.
        self.prefilling = dict.fromkeys(workers, 0)
        self.lock = threading.Lock()

    def matches(self, hashes):
        """Leading blocks that each address can reuse; nothing where there is no answer."""
        if not hashes or not self.permits.acquire(blocking=False):
            return {}
        try:
            request = kv_indexer_pb2.MatchExternalKvPrefixRequest(hashes=hashes[:HASHES_MAX])
            answer = self.index.MatchExternalKvPrefix(request, timeout=DEADLINE_SECONDS)
            return {match.worker_address: match.matched_prefix_blocks for match in answer.matches}
        except grpc.RpcError as error:
            if error.code() not in FALLS_BACK:
                raise
            print(f"routing by load: {error.code().name}: {error.details()}", flush=True)
            return {}
        finally:
            self.permits.release()

    def choose(self, blocks, matches):
        """The worker with the fewest blocks to prefill, which it is told of; and how many are this prompt's."""
        with self.lock:
            missing = {worker: max(blocks - matches.get(worker, 0), 0) for worker in self.prefilling}
            worker = min(missing, key=lambda worker: self.prefilling[worker] + missing[worker])
            # Equal ones take turns: the chosen one goes to the end.
            self.prefilling[worker] = self.prefilling.pop(worker) + missing[worker]
        return worker, missing[worker]

    def prefilled(self, worker, missing):
        with self.lock:
            self.prefilling[worker] -= missing

    def tokens(self, body):
        """Token ids of a request's prompt; none where there is no telling."""
        try:
            prompt = json.loads(body).get("prompt")
            if not isinstance(prompt, list):
                # A worker's own tokenizer; in production the router has the model's in itself.
                url = f"{next(iter(self.prefilling))}/tokenize"
                headers = {"Content-Type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5) as answer:
                    prompt = json.load(answer)["tokens"]
            return [token for token in prompt if 0 <= token < 2**32]
        except (ValueError, TypeError, KeyError, AttributeError, OSError, http.client.HTTPException):
            return []


def handler(router):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= BODY_BYTES_MAX:
                return self.send_error(413)
            body = self.rfile.read(length)
            hashes = block_hashes(router.tokens(body), router.page_size)
            try:
                matches = router.matches(hashes)
            except grpc.RpcError as error:
                return self.send_error(502, f"the index disagrees: {error.code().name}")
            worker, missing = router.choose(len(hashes), matches)
            print(f"{missing} of {len(hashes)} blocks to prefill at {worker}", flush=True)
            try:
                self.forward(worker, body)
            finally:
                router.prefilled(worker, missing)

        def forward(self, worker, body):
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
            request = urllib.request.Request(worker + self.path, body, headers)
            try:
                answer = urllib.request.urlopen(request)
            except urllib.error.HTTPError as error:
                answer = error
            except OSError as error:
                return self.send_error(502, str(error))
            with answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.end_headers()
                # As it comes, for answers that stream.
                while part := answer.read1():
                    self.wfile.write(part)

        def log_message(self, *_):
            pass

    return Handler


def main():
    if len(sys.argv) < 5:
        sys.exit("usage: router.py LISTEN_PORT INDEX PAGE_SIZE WORKER...")
    port, index, page_size, *workers = sys.argv[1:]
    router = Router(index, int(page_size), workers)
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler(router))
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
