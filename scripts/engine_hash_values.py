"""Block hashes by the engines' own code, as JSON, for scripts/engine-hash-values.

The engines import half of a deep-learning stack, of which hashing needs nothing. So
the functions are taken out of the packages' sources by name and run as they stand;
SGLang's native part is compiled from the source in its package.
"""

import ast
import glob
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import types
import zipfile

WORK = sys.argv[1]


def unpack(engine):
    """Unpacks the engine's wheel; returns its folder and version."""
    (wheel,) = glob.glob(f"{WORK}/wheels/{engine}-*.whl")
    folder = f"{WORK}/{engine}"
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith((".py", "hash_binding.cpp"))]
        archive.extractall(folder, wanted)
    return folder, os.path.basename(wheel).split("-")[1]


def take(path, names, given):
    """Runs the named functions and constants of a source file in a module of their own."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    found = []
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        name = getattr(node, "name", None) or getattr(targets[0], "id", None)
        if name in names:
            found.append(node)
    module = types.ModuleType("taken")
    module.__dict__.update(given)
    code = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *found], [])
    exec(compile(ast.fix_missing_locations(code), path, "exec"), module.__dict__)
    missing = [name for name in names if name not in module.__dict__]
    assert not missing, f"{path} has no {missing}"
    return module


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_code(folder):
    import hashlib
    from array import array
    from typing import Any, List, Optional

    import pybind11

    cache = f"{folder}/sglang/srt/mem_cache"
    built = f"{folder}/hicache_hash_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=hicache_hash_cpp", "-w"]
    source = f"{cache}/cpp_utils/hash_binding.cpp"
    subprocess.run(["c++", *flags, *includes, source, "-lcrypto", "-o", built], check=True)
    native = load("hicache_hash_cpp", built)
    given = {"array": array, "Any": Any, "Optional": Optional, "_load_native_hash_module": lambda: native}
    hashing = take(f"{cache}/cpp_utils/native_hash.py", ["_native_hash_input", "get_native_hash"], given)
    given = {"List": List, "Optional": Optional, "get_native_hash": hashing.get_native_hash}
    utils = take(f"{cache}/utils.py", ["get_hash_str", "hash_str_to_int64"], given)
    names = ["_NAMESPACE_SEED_TAG", "kv_event_namespace_seed", "namespaced_block_hash"]
    events = take(f"{folder}/sglang/srt/disaggregation/kv_events.py", names, {"hashlib": hashlib})
    return utils, events


class Key:
    """The part of a RadixKey that hashing looks at."""

    def __init__(self, tokens, bigram):
        self.token_ids = tokens
        self.is_bigram = bigram

    def __len__(self):
        return max(len(self.token_ids) - 1, 0) if self.is_bigram else len(self.token_ids)


def sglang_values(folder):
    import hashlib

    utils, events = sglang_code(folder)
    dice = random.Random(1)

    def value(page_size, pages, tail=0, bigram=False, salt=None, namespace=None, wide=()):
        tokens = [dice.randrange(150_000) for _ in range(page_size * pages + tail + bigram)]
        for at, token in wide:
            tokens[at] = token
        # As in compute_node_event_hash_values: a salt starts the chain, an extra key does not.
        seed = None if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).hexdigest()
        hexes = utils.get_hash_str(Key(tokens, bigram), seed, page_size=page_size)
        hashes = [utils.hash_str_to_int64(text) for text in hexes][:pages]
        if namespace is not None:
            extra_key, cache_salt = namespace
            seed = events.kv_event_namespace_seed(extra_key=extra_key, cache_salt=cache_salt)
            hashes = [events.namespaced_block_hash(hash, namespace_seed=seed) for hash in hashes]
        return {
            "page_size": page_size,
            "bigram": bigram,
            "cache_salt": salt,
            "namespace": namespace,
            "tokens": tokens,
            "hashes": hashes,
        }

    lora = "tenant|0123456789abcdef0123456789abcdef"
    return [
        value(1, 9),
        value(16, 4),
        value(16, 3, tail=7),
        value(64, 2),
        value(4, 0, tail=3),
        value(4, 4, salt="tenant"),
        value(4, 3, salt="Grüße, 世界"),
        value(4, 3, namespace=(lora, None)),
        value(4, 3, namespace=(None, "salt")),
        value(4, 3, salt="salt", namespace=(lora, "salt")),
        value(4, 3, namespace=("", None)),
        value(4, 4, bigram=True),
        value(1, 5, bigram=True),
        value(4, 3, tail=2, bigram=True),
        value(4, 3, salt="tenant", bigram=True),
        # Token ids past 32 bits, in the middle of a page, at the edges of pages and of pairs.
        value(4, 3, wide=[(5, 2**32)]),
        value(4, 3, wide=[(0, 2**32 - 1), (4, 2**40), (11, 2**63 - 1)]),
        value(4, 3, bigram=True, wide=[(4, 2**33)]),
    ]


def vllm_code(folder):
    import hashlib
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NewType

    hashing = load("vllm_hashing", f"{folder}/vllm/utils/hashing.py")
    names = [
        "BlockHash",
        "DEFAULT_NONE_HASH_SEED",
        "_NON_CRYPTO_HASH_FUNCTIONS",
        "resolve_none_hash_seed",
        "init_none_hash",
        "maybe_convert_block_hash",
        "_gen_mm_extra_hash_keys",
        "_gen_lora_extra_hash_keys",
        "_gen_prompt_embeds_extra_hash_keys",
        "generate_block_hash_extra_keys",
        "hash_block_tokens",
    ]
    given = {
        "hashlib": hashlib,
        "os": os,
        "Any": Any,
        "NewType": NewType,
        "Callable": Callable,
        "Iterable": Iterable,
        "Sequence": Sequence,
        "xxhash": hashing.xxhash,
        "xxhash_cbor": hashing.xxhash_cbor,
        "envs": types.SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True),
    }
    return hashing, take(f"{folder}/vllm/v1/core/kv_cache_utils.py", names, given)


def vllm_values(folder):
    hashing, utils = vllm_code(folder)
    dice = random.Random(2)

    def value(block_size, blocks, tail=0, seed=None, lora=None, salt=None, media=(), wide=()):
        tokens = [dice.randrange(150_000) for _ in range(block_size * blocks + tail)]
        for at, token in wide:
            tokens[at] = token
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        utils.init_none_hash(hashing.sha256_cbor)
        place = lambda offset, length: types.SimpleNamespace(offset=offset, length=length)
        request = types.SimpleNamespace(
            mm_features=[
                types.SimpleNamespace(identifier=name, mm_position=place(offset, length))
                for name, offset, length in media
            ],
            lora_request=lora and types.SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
            cache_salt=salt,
            prompt_embeds=None,
        )
        hashes, parent, medium = [], None, 0
        for start in range(0, block_size * blocks, block_size):
            end = start + block_size
            keys, medium = utils.generate_block_hash_extra_keys(request, start, end, medium)
            parent = utils.hash_block_tokens(hashing.sha256_cbor, parent, tokens[start:end], keys)
            hashes.append(utils.maybe_convert_block_hash(parent))
        return {
            "block_size": block_size,
            "seed": seed,
            "lora": lora,
            "cache_salt": salt,
            "media": media,
            "tokens": tokens,
            "hashes": hashes,
        }

    lora = ("adapter", "/adapters/one")
    return [
        value(1, 5),
        value(16, 4),
        value(16, 3, tail=7),
        # As many tokens as make the lengths of CBOR's lists go from one to two and three bytes.
        value(23, 2),
        value(24, 2),
        value(256, 1),
        value(4, 0, tail=3),
        # Numbers at the edges of CBOR's integers.
        value(4, 3, wide=[(0, 0), (1, 23), (2, 24), (3, 255), (4, 256), (5, 65_535), (6, 65_536), (7, 2**32 - 1)]),
        value(4, 1, wide=[(0, 2**32), (1, 2**63 - 1)]),
        value(4, 3, seed="0"),
        value(4, 3, seed="fleet-seven"),
        value(4, 3, salt="tenant"),
        value(4, 3, salt=""),
        value(4, 3, lora=lora),
        value(4, 5, media=[("image-1", 2, 9)]),
        value(4, 4, media=[("image-1", 0, 4), ("image-2", 5, 2), ("image-3", 7, 9)]),
        value(64, 3, media=[("b" * 64, 30, 60), ("c" * 300, 100, 40)]),
        value(4, 4, lora=lora, salt="Grüße, 世界", media=[("image-1", 3, 6)]),
    ]


def main():
    from importlib.metadata import version

    sglang, sglang_version = unpack("sglang")
    vllm, vllm_version = unpack("vllm")
    values = {
        "made_by": "scripts/engine-hash-values",
        "versions": {"sglang": sglang_version, "vllm": vllm_version, "cbor2": version("cbor2")},
        "sglang": sglang_values(sglang),
        "vllm_sha256_cbor": vllm_values(vllm),
    }
    print("{")
    rows = []
    for key, value in values.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value)
            rows.append(f'"{key}": [\n{lines}\n]')
        else:
            rows.append(f'"{key}": {json.dumps(value)}')
    print(",\n".join(rows))
    print("}")


main()
