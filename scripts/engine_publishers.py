"""Follows the engines' own publishers and caches with the real binaries and compares what the index comes to hold with
what the engine itself holds. See engine-publishers, which prepares what this needs."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import grpc
import kv_indexer_pb2 as pb

BINS, RECORD, ENGINES = sys.argv[1], sys.argv[2], sys.argv[3:]
HERE = os.path.dirname(os.path.abspath(__file__))
WORKER, ADDRESS = "w0", "http://w0:30000"
PATIENCE = 60.0
CONNECTED = "connected to the publisher"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    """The engine's classes in a process of their own, so that it can be killed."""

    def __init__(self, kind: str, ports: tuple[int, int], replays: bool, hwm: int):
        replay = f"tcp://127.0.0.1:{ports[1]}" if replays else ""
        self.process = subprocess.Popen(
            [sys.executable, f"{HERE}/engine_stand.py", kind, f"tcp://*:{ports[0]}", replay, str(hwm)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.version = self.answer()["version"]

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the engine's process has ended"
        return json.loads(line)

    def do(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()


class Stand:
    """An engine, a bridge and a server."""

    def __init__(self, kind: str, replays: bool, hwm: int = 100_000, bridge: bool = True):
        self.kind, self.replays, self.hwm = kind, replays, hwm
        self.ports, port = (free_port(), free_port()), free_port()
        self.target = f"127.0.0.1:{port}"
        self.logs = tempfile.TemporaryFile("w+")
        self.server = subprocess.Popen([f"{BINS}/kv-indexer-server"], stderr=subprocess.DEVNULL,
                                       env={**os.environ, "KV_INDEXER_LISTEN_ADDR": self.target})
        channel = grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", -1)])
        self.calls = {
            name: channel.unary_unary(f"/kv_indexer.v1.KVIndexer/{name}",
                                      request_serializer=request.SerializeToString,
                                      response_deserializer=response.FromString)
            for name, request, response in [
                ("MatchExternalKv", pb.MatchExternalKvRequest, pb.MatchExternalKvResponse),
                ("MatchExternalKvPrefix", pb.MatchExternalKvPrefixRequest, pb.MatchExternalKvPrefixResponse)]}
        grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        self.bridge = None
        self.engine = Engine(kind, self.ports, replays, hwm)
        if bridge:
            self.start_bridge()

    def start_bridge(self):
        variables = {
            "KV_INDEXER_WORKER_ID": WORKER, "KV_INDEXER_WORKER_ADDRESS": ADDRESS,
            "KV_INDEXER_ENDPOINT": f"http://{self.target}", "RUST_LOG": "info",
            "SGLANG_KV_EVENT_ENDPOINT": f"tcp://127.0.0.1:{self.ports[0]}", "SGLANG_KV_EVENT_TOPIC": "kv-events"}
        if self.replays:
            variables["SGLANG_KV_REPLAY_ENDPOINT"] = f"tcp://127.0.0.1:{self.ports[1]}"
        if self.kind == "vllm-hybrid":
            variables |= {"KV_INDEXER_CACHE_COMPONENTS": "full,swa", "KV_INDEXER_SWA_WINDOW_TOKENS": "64"}
        seen = self.log().count(CONNECTED)
        self.bridge = subprocess.Popen([f"{BINS}/kv-indexer-bridge"], env={**os.environ, **variables},
                                       stderr=self.logs)
        self.await_log(CONNECTED, seen)
        # A PUB learns of its subscriber a moment after that knows of it, and says nothing of it to anybody.
        time.sleep(0.5)

    def log(self) -> str:
        with open(f"/proc/self/fd/{self.logs.fileno()}") as log:
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read())

    def await_log(self, text: str, seen: int):
        """Waits until the bridges have said `text` more often than `seen` times."""
        deadline = time.monotonic() + PATIENCE
        while self.log().count(text) <= seen:
            assert time.monotonic() < deadline, f"the bridge never said: {text}"
            time.sleep(0.05)

    def restart_engine(self):
        seen = self.log().count(CONNECTED)
        self.engine.kill()
        self.engine = Engine(self.kind, self.ports, self.replays, self.hwm)
        self.await_log(CONNECTED, seen)
        time.sleep(0.5)

    def found(self, named: list[int]) -> dict[int, int]:
        held = {}
        for at in range(0, len(named), 16_384):
            answer = self.calls["MatchExternalKv"](pb.MatchExternalKvRequest(hashes=named[at:at + 16_384]))
            for match in answer.matches:
                for tier in match.hashes_by_tier:
                    held.update(zip(tier.hashes, tier.component_masks))
        return held

    def check(self) -> str:
        """Waits until the index holds exactly what the engine does, then compares the prefixes of its prompts."""
        deadline = time.monotonic() + PATIENCE
        while True:
            truth = self.engine.do(do="truth")
            held = {block: mask for block, mask in truth["held"]}
            found = self.found(truth["named"])
            if found == held:
                break
            if time.monotonic() > deadline:
                more, less = len(found.keys() - held.keys()), len(held.keys() - found.keys())
                raise AssertionError(f"the index holds {more} blocks too many and {less} too few of {len(held)}")
            time.sleep(0.1)
        wrong = 0
        for hashes, blocks in truth["queries"]:
            answer = self.calls["MatchExternalKvPrefix"](pb.MatchExternalKvPrefixRequest(hashes=hashes)) \
                if hashes else None
            wrong += (answer.best_prefix_blocks if answer else 0) != blocks
        assert wrong == 0, f"{wrong} of {len(truth['queries'])} prefixes differ from the engine's"
        return f"{len(held)} blocks held, {len(truth['named'])} named, {len(truth['queries'])} prefixes"

    def stop(self) -> str:
        """Ends everything; returns the bridge's last words."""
        if self.bridge and self.bridge.poll() is None:
            self.bridge.send_signal(signal.SIGCONT)
            self.bridge.send_signal(signal.SIGTERM)
            self.bridge.wait(timeout=20)
        self.engine.kill()
        self.server.kill()
        self.server.wait()
        last = [line for line in self.log().splitlines() if "bridge stops" in line]
        return last[-1][last[-1].index("bridge stops"):] if last else "the bridge was killed"


def churn(stand: Stand) -> str:
    stand.engine.do(do="work", seed=1, count=400)
    return stand.check()


def clears(stand: Stand) -> str:
    stand.engine.do(do="work", seed=2, count=50)
    stand.check()
    stand.engine.do(do="clear")
    stand.check()
    stand.engine.do(do="work", seed=3, count=50)
    return stand.check()


def restart(stand: Stand) -> str:
    stand.engine.do(do="work", seed=4, count=60)
    stand.check()
    stand.restart_engine()
    stand.engine.do(do="work", seed=5, count=40)
    return stand.check()


def bridge_killed(stand: Stand) -> str:
    stand.engine.do(do="work", seed=6, count=60)
    stand.check()
    stand.bridge.kill()
    stand.bridge.wait()
    stand.engine.do(do="work", seed=7, count=60)
    stand.start_bridge()
    return stand.check()


def late(stand: Stand) -> str:
    stand.engine.do(do="work", seed=8, count=300)
    stand.start_bridge()
    return stand.check()


def throttle(stand: Stand):
    """Keeps the bridge from running, and so from reading, until the engine's socket is past its mark and drops."""
    stand.engine.do(do="work", seed=9, count=20)
    stand.check()
    stand.bridge.send_signal(signal.SIGSTOP)
    # About 15 MB of events, where the mark is 50 messages and the kernel keeps a few megabytes.
    stand.engine.do(do="work", seed=10, count=800, tokens=4_000)
    stand.engine.do(do="truth")
    stand.bridge.send_signal(signal.SIGCONT)
    # The bridge reads what there is; only a later batch shows that some before it are missing.
    time.sleep(1)
    stand.engine.do(do="work", seed=11, count=5)
    stand.await_log("batches are missing from the stream", 0)


def throttled(stand: Stand) -> str:
    throttle(stand)
    return stand.check()


def throttled_for_good(stand: Stand) -> str:
    throttle(stand)
    # What the engine clears is known again.
    stand.engine.do(do="clear")
    stand.engine.do(do="work", seed=12, count=20)
    return stand.check()


SCENARIOS = [
    ("stores and removals", churn, {"replays": False}),
    ("clears", clears, {"replays": False}),
    ("killed and started again", restart, {"replays": False}),
    ("killed and started again, with replay", restart, {"replays": True}),
    ("bridge killed, with replay", bridge_killed, {"replays": True}),
    ("late replay", late, {"replays": True, "bridge": False}),
    ("throttled until the mark drops, with replay", throttled, {"replays": True, "hwm": 50}),
    ("throttled until the mark drops, then cleared", throttled_for_good, {"replays": False, "hwm": 50}),
]


def main() -> int:
    lines, failed = [], 0
    for kind in ENGINES:
        for name, scenario, options in SCENARIOS:
            stand = Stand(kind, **options)
            engine = f"{kind} {stand.engine.version}"
            try:
                outcome = "passed: " + scenario(stand)
            except AssertionError as error:
                outcome, failed = f"FAILED: {error}", failed + 1
            last = stand.stop()
            lines += [f"{engine}, {name}: {outcome}", f"    {last}"]
            print("\n".join(lines[-2:]), flush=True)
    if RECORD:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "pyzmq", "msgspec"))
        commit = subprocess.run(["git", "describe", "--always", "--dirty=, changed"], capture_output=True, text=True,
                                cwd=HERE).stdout.strip()
        with open(RECORD, "w") as record:
            record.write(f"# {datetime.date.today()}, commit {commit}, Python {platform.python_version()}, {versions},"
                         f" {platform.system()} {platform.machine()}\n" + "\n".join(lines) + "\n")
    print(f"{len(ENGINES) * len(SCENARIOS) - failed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
