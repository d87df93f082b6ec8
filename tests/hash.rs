//! Block hashes against what the engines' own code computed, and against recorded streams.

mod common;

use std::fs;
use std::num::NonZeroUsize;

use common::capture::{self, Capture};
use serde_json::Value;
use sgl_kv_indexer::client::Prompt;
use sgl_kv_indexer::hash::{Media, Sglang, VllmCbor};

fn values(engine: &str) -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/engine-hash-values.json");
    let all: Value = serde_json::from_str(&fs::read_to_string(path).expect("values")).expect("JSON");
    let values = all[engine].as_array().expect("a list").clone();
    assert!(values.len() > 10, "{} values", values.len());
    values
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().expect("a list").iter().map(|number| number.as_u64().expect("a number")).collect()
}

/// A hash, as a signed or unsigned number or as its text.
fn hash(value: &Value) -> i64 {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.parse().or_else(|_| text.parse::<u64>().map(|hash| hash as i64)).expect("64 bits")
}

fn hashes(list: &Value) -> Vec<i64> {
    list.as_array().expect("a list").iter().map(hash).collect()
}

fn size(value: &Value) -> NonZeroUsize {
    NonZeroUsize::new(value.as_u64().expect("a number") as usize).expect("not zero")
}

/// The hashes, however their number is told.
fn collected(hashes: impl ExactSizeIterator<Item = i64>) -> Vec<i64> {
    let length = hashes.len();
    let hashes: Vec<i64> = hashes.collect();
    assert_eq!(hashes.len(), length, "as many as announced");
    hashes
}

fn sglang_of(value: &Value) -> Sglang {
    let mut rules = Sglang::new(size(&value["page_size"])).pairs(value["bigram"] == true);
    if let Some(salt) = value["cache_salt"].as_str() {
        rules = rules.cache_salt(salt);
    }
    if let Some(namespace) = value["namespace"].as_array() {
        rules = rules.namespace(namespace[0].as_str(), namespace[1].as_str());
    }
    rules
}

#[test]
fn sglang_hashes_are_the_engines() {
    for value in values("sglang") {
        let (rules, tokens) = (sglang_of(&value), numbers(&value["tokens"]));
        assert_eq!(collected(rules.hashes(&tokens)), hashes(&value["hashes"]), "{value}");
        if let Ok(narrow) = tokens.iter().map(|token| u32::try_from(*token)).collect::<Result<Vec<_>, _>>() {
            assert!(rules.hashes(&narrow).eq(rules.hashes(&tokens)), "{value}");
        }
    }
}

#[test]
fn vllm_hashes_are_the_engines() {
    for value in values("vllm_sha256_cbor") {
        let mut rules = VllmCbor::new(size(&value["block_size"]));
        if let Some(seed) = value["seed"].as_str() {
            rules = rules.seed(seed);
        }
        if let Some(lora) = value["lora"].as_array() {
            rules = rules.lora(lora[0].as_str().expect("text"), lora[1].as_str().expect("text"));
        }
        if let Some(salt) = value["cache_salt"].as_str() {
            rules = rules.cache_salt(salt);
        }
        let media = value["media"].as_array().expect("a list").iter().rev().map(|media| {
            let at = |place: usize| media[place].as_u64().expect("a number") as usize;
            let identifier = media[0].as_str().expect("text").to_owned();
            Media { identifier, tokens: at(1)..at(1) + at(2) }
        });
        rules = rules.media(media.collect());
        let tokens = numbers(&value["tokens"]);
        assert_eq!(collected(rules.hashes(&tokens)), hashes(&value["hashes"]), "{value}");
    }
}

/// Every prompt that a recording of SGLang asked for, hashed from its tokens.
#[test]
fn recorded_prompts_hash_to_the_recorded_hashes() {
    let (mut checked, mut namespaces) = (0, 0);
    for name in capture::names() {
        let capture = Capture::read(&name);
        // The oldest one hashes by Python's own `hash`, without a chain.
        if !name.starts_with("sglang") || name == "sglang-old-0.5.3" {
            continue;
        }
        let Some(queries) = capture.expected["queries"].as_array() else { continue };
        for query in queries {
            if query["tokens"].is_null() {
                continue;
            }
            let mut rules =
                Sglang::new(size(&capture.header["page_size"])).pairs(capture.header["bigram"] == true);
            if let Some(salt) = query["cache_salt"].as_str() {
                rules = rules.cache_salt(salt);
            }
            // Of the recorded extra keys, those that end in an adapter's id are of a registered one.
            let adapter = query["extra_key"].as_str().filter(|key| {
                let id = key.rsplit('|').next().unwrap_or_default();
                id.len() == 32 && id.bytes().all(|digit| digit.is_ascii_hexdigit())
            });
            namespaces += usize::from(adapter.is_some());
            let rules = rules.namespace(adapter, None);
            let found = collected(rules.hashes(&numbers(&query["tokens"])));
            assert_eq!(found, hashes(&query["hashes"]), "{name}: {query}");
            checked += 1;
        }
    }
    assert!(checked > 100 && namespaces > 0, "{checked} prompts, {namespaces} in a namespace");
}

#[test]
fn an_empty_salt_is_none_and_what_a_namespace_is_made_of_counts() {
    let page = NonZeroUsize::new(2).expect("not zero");
    let tokens = [1_u32, 2, 3, 4];
    let of = |rules: &Sglang| collected(rules.hashes(&tokens));
    let plain = of(&Sglang::new(page));
    assert_eq!(of(&Sglang::new(page).cache_salt("")), plain);
    assert_eq!(of(&Sglang::new(page).namespace(None, None)), plain);
    let spaces = [
        (Some("a"), Some("bc")),
        (Some("ab"), Some("c")),
        (Some("abc"), None),
        (None, Some("abc")),
        (Some(""), None),
    ];
    let mut all: Vec<_> =
        spaces.iter().map(|(key, salt)| of(&Sglang::new(page).namespace(*key, *salt))).collect();
    all.push(plain);
    all.sort();
    all.dedup();
    assert_eq!(all.len(), spaces.len() + 1);
    let vllm = VllmCbor::new(page);
    assert!(vllm.hashes(&tokens).eq(vllm.clone().cache_salt("").hashes(&tokens)));
}

#[test]
fn what_is_left_after_the_last_whole_block_has_no_hash() {
    for page in [1_usize, 3, 4] {
        let rules = Sglang::new(NonZeroUsize::new(page).expect("not zero"));
        let (pairs, vllm) =
            (rules.clone().pairs(true), VllmCbor::new(NonZeroUsize::new(page).expect("not zero")));
        let tokens: Vec<u32> = (0..13).collect();
        for length in 0..tokens.len() {
            let tokens = &tokens[..length];
            assert_eq!(collected(rules.hashes(tokens)).len(), length / page);
            assert_eq!(collected(vllm.hashes(tokens)).len(), length / page);
            assert_eq!(collected(pairs.hashes(tokens)).len(), length.saturating_sub(1) / page);
            assert_eq!(Prompt::collect(rules.hashes(tokens)).blocks(), length / page);
        }
    }
}
