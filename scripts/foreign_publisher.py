"""Publishes KV events through libzmq to a bridge and checks what the bridge counted. See foreign-publisher-check."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import msgspec
import zmq

BINS = sys.argv[1]
COUNT = 500


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def payload(number: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [number - 250], "parent_block_hash": None,
             "token_ids": list(range(16)), "block_size": 16, "lora_id": None, "medium": "GPU"}
    return msgspec.msgpack.encode([time.time(), [event], 0])


def run(name: str, bridge_binds: bool, with_replay: bool) -> None:
    context = zmq.Context()
    server_port, port, replay_port = free_port(), free_port(), free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.LINGER, 0)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, COUNT * 2)
    router.bind(f"tcp://127.0.0.1:{replay_port}")
    variables = {"KV_INDEXER_WORKER_ID": "w0", "KV_INDEXER_ENDPOINT": f"http://127.0.0.1:{server_port}",
                 "SGLANG_KV_EVENT_ENDPOINT": endpoint, "SGLANG_KV_EVENT_TOPIC": "kv"}
    if bridge_binds:
        variables["SGLANG_KV_EVENT_BIND"] = "true"
        publisher.connect(endpoint)
    else:
        publisher.bind(endpoint)
    if with_replay:
        variables["SGLANG_KV_REPLAY_ENDPOINT"] = f"tcp://127.0.0.1:{replay_port}"
    server = subprocess.Popen([f"{BINS}/kv-indexer-server"],
                              env={**os.environ, "KV_INDEXER_LISTEN_ADDR": f"127.0.0.1:{server_port}"},
                              stderr=subprocess.DEVNULL)
    bridge = subprocess.Popen([f"{BINS}/kv-indexer-bridge"], env={**os.environ, **variables, "RUST_LOG": "info"},
                              stderr=subprocess.PIPE, text=True)
    try:
        assert publisher.poll(10_000), "nobody subscribes"
        assert publisher.recv() == b"\x01kv"
        batches = [(number.to_bytes(8, "big"), payload(number)) for number in range(COUNT)]
        for number, (sequence, data) in enumerate(batches):
            # Every seventh is lost on the way when there is a replay to bring it back.
            if not (with_replay and number % 7 == 3):
                publisher.send_multipart([b"kv", sequence, data])
        deadline = time.monotonic() + 20
        while with_replay and time.monotonic() < deadline and router.poll(1_500):
            peer, _, start = router.recv_multipart()
            for sequence, data in batches[int.from_bytes(start, "big"):]:
                router.send_multipart([peer, b"", b"kv", sequence, data])
            router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])
        time.sleep(1)
        bridge.send_signal(signal.SIGTERM)
        _, told = bridge.communicate(timeout=20)
    finally:
        bridge.kill()
        server.kill()
        server.wait()
        publisher.close(0)
        router.close(0)
        context.term()
    told = re.sub(r"\x1b\[[0-9;]*m", "", told)
    last = next(line for line in told.splitlines() if "bridge stops" in line)
    assert f"batches={COUNT}" in last and ": complete" in last, told
    print(f"{name}: {last[last.index('bridge stops'):]}")


run("PUB that binds", False, False)
run("PUB that connects", True, False)
run("PUB that loses, with replay", False, True)
print(f"passed with libzmq {zmq.zmq_version()}")
