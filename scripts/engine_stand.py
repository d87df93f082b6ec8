"""One engine's own publisher and cache classes, driven by lines of JSON on standard input. See engine-publishers.

Each command is answered by one line of JSON on standard output. A command works on prompts of a seeded generator, so
that a run can be repeated, and publishes what the cache reports after every request, as a scheduler does after every
step.
"""

import hashlib
import json
import random
import sys
import time
from array import array

PAGE = 16
BLOCKS = 600


def prompts(seed: int, count: int, tokens: int = 0):
    """Prompts that share prefixes: each continues one of a few conversations or cuts it short. With `tokens`, new ones
    of that length."""
    chance = random.Random(seed)
    if tokens:
        for _ in range(count):
            yield [chance.randrange(100_000) for _ in range(tokens)]
        return
    talks = [[chance.randrange(100_000) for _ in range(64)] for _ in range(8)]
    for _ in range(count):
        talk = chance.randrange(len(talks))
        if len(talks[talk]) > 1_500:
            talks[talk] = [chance.randrange(100_000) for _ in range(64)]
        talks[talk] = talks[talk] + [chance.randrange(100_000) for _ in range(chance.randrange(16, 200))]
        yield talks[talk][: chance.choice([len(talks[talk]), len(talks[talk]) // 2])]


class Sglang:
    """SGLang's RadixCache over an allocator that only counts."""

    def __init__(self, endpoint: str, replay: str | None, hwm: int):
        import sglang
        from sglang.srt.disaggregation import kv_events
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache

        class Allocator:
            device = "cpu"

            def free_segment(self, *_, **__):
                pass

        self.version = sglang.__version__
        self.events, self.base, self.radix = kv_events, base_prefix_cache, radix_cache
        self.cache = radix_cache.RadixCache.create_simulated(
            mock_allocator=Allocator(), page_size=PAGE, enable_kv_cache_events=True)
        self.publisher = kv_events.ZmqEventPublisher(
            0, endpoint=endpoint, replay_endpoint=replay, hwm=hwm, topic="kv-events")
        self.publish()

    def publish(self):
        events = self.cache.take_events()
        if events:
            self.publisher.publish(self.events.KVEventBatch(ts=time.time(), events=events))

    def key(self, tokens: list[int]):
        return self.radix.RadixKey(array("q", tokens))

    def request(self, tokens: list[int]):
        over = self.cache.total_size() + len(tokens) - BLOCKS * PAGE
        if over > 0:
            self.cache.evict(self.base.EvictParams(num_tokens=over))
        self.cache.insert(self.base.InsertParams(key=self.key(tokens)))
        self.publish()

    def clear(self):
        self.cache.reset()
        self.publish()

    def hashes(self, tokens: list[int]) -> list[int]:
        digest, chain = b"", []
        for at in range(0, len(tokens) // PAGE * PAGE, PAGE):
            page = array("I", tokens[at:at + PAGE])
            digest = hashlib.sha256(digest + page.tobytes()).digest()
            chain.append(int.from_bytes(digest[:8], "big", signed=True))
        return chain

    def held(self) -> dict[int, int]:
        found, waiting = {}, [(self.cache.root_node, [])]
        while waiting:
            node, before = waiting.pop()
            tokens = before + list(node.key.token_ids)
            found.update((block, 0) for block in self.hashes(tokens)[len(before) // PAGE:])
            waiting.extend((child, tokens) for child in node.children.values())
        return found

    def prefix(self, tokens: list[int]) -> int:
        found = self.cache.match_prefix(self.base.MatchPrefixParams(key=self.key(tokens)))
        return found.device_prefix_len // PAGE


class Vllm:
    """vLLM's KVCacheManager; `hybrid` gives it a group of full attention and one of a sliding window."""

    def __init__(self, endpoint: str, replay: str | None, hwm: int, hybrid: bool):
        import torch
        import vllm
        from vllm.distributed import kv_events
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.request import Request

        self.version = vllm.__version__
        self.events, self.utils = kv_events, kv_cache_utils
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(PAGE, sha256)
        self.sampling, self.make = SamplingParams(max_tokens=1), Request
        shape = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        if hybrid:
            groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=4 * PAGE)))
        self.hybrid = hybrid
        self.manager = kv_cache_manager.KVCacheManager(
            KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=100_000, scheduler_block_size=PAGE, hash_block_size=PAGE, enable_kv_cache_events=True)
        self.publisher = kv_events.ZmqEventPublisher(
            0, endpoint=endpoint, replay_endpoint=replay, hwm=hwm, topic="kv-events")
        self.number, self.running = 0, []

    def publish(self):
        events = self.manager.take_events()
        if events:
            self.publisher.publish(self.events.KVEventBatch(ts=time.time(), events=events))

    def new(self, tokens: list[int]):
        self.number += 1
        return self.make(str(self.number), tokens, self.sampling, None, block_hasher=self.hasher)

    def request(self, tokens: list[int]):
        request = self.new(tokens)
        blocks, computed, _ = self.manager.get_computed_blocks(request)
        # A few requests run at once, so that the same block gets several copies.
        while self.manager.allocate_slots(request, len(tokens) - computed, computed, blocks) is None:
            self.manager.free(self.running.pop(0))
            blocks, computed, _ = self.manager.get_computed_blocks(request)
        self.running.append(request)
        while len(self.running) > 3:
            self.manager.free(self.running.pop(0))
        self.publish()

    def clear(self):
        while self.running:
            self.manager.free(self.running.pop())
        assert self.manager.reset_prefix_cache()
        self.publish()

    @staticmethod
    def fold(block_hash: bytes) -> int:
        return int.from_bytes(block_hash[-8:], "big", signed=True)

    def hashes(self, tokens: list[int]) -> list[int]:
        return [self.fold(block) for block in self.new(tokens).block_hashes]

    def held(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for key in self.manager.block_pool.cached_block_hash_to_block._cache:
            block, group = self.fold(self.utils.get_block_hash(key)), self.utils.get_group_id(key)
            found[block] = found.get(block, 0) | (1 << group if self.hybrid else 0)
        return found

    def prefix(self, tokens: list[int]) -> int:
        # One token more, as vLLM always computes the last one anew.
        _, computed, _ = self.manager.get_computed_blocks(self.new(tokens + [0]))
        return computed // PAGE


def main():
    kind, endpoint, replay, hwm = sys.argv[1], sys.argv[2], sys.argv[3] or None, int(sys.argv[4])
    answers, sys.stdout = sys.stdout, sys.stderr
    if kind == "sglang":
        engine = Sglang(endpoint, replay, hwm)
    else:
        engine = Vllm(endpoint, replay, hwm, kind == "vllm-hybrid")
    asked: list[list[int]] = []
    named: set[int] = set()

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    answer({"version": engine.version})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "work":
            for tokens in prompts(command["seed"], command["count"], command.get("tokens", 0)):
                engine.request(tokens)
                named.update(engine.hashes(tokens))
                asked = asked[-199:] + [tokens]
            answer({})
        elif command["do"] == "clear":
            engine.clear()
            answer({})
        elif command["do"] == "truth":
            while engine.publisher._event_queue.qsize():
                time.sleep(0.01)
            held = engine.held()
            answer({"held": [[block, mask] for block, mask in held.items()], "named": sorted(named | held.keys()),
                    "queries": [[engine.hashes(tokens), engine.prefix(tokens)] for tokens in asked[-40:]]})


main()
