//! The whole path: both real binaries between a publisher and a router.
//!
//! A recorded stream goes through one `kv-indexer-bridge` per rank into a
//! `kv-indexer-server`. At its end a marker is stored; order holds along the
//! path, so once the index has the marker it must be exactly in the recorded
//! final state: what each worker holds where, with which components, and every
//! recorded query's answer. Polling is bounded by tries, not by the clock, and no
//! outcome depends on speed.
//!
//! Every recording in `tests/data` is in one of the tables below or in
//! [`LEFT_OUT`], which says why.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::binaries::{Held, Running, client, held, prefixes, wait_for};
use common::capture::{Capture, names, state_of};
use common::publisher::{Event, Publisher, batch};
use serde_json::Value;
use sgl_kv_indexer::bridge::event::Decoder;

/// A recording and what its bridges are told beside names and endpoints.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

const SGLANG: &[Row] = &[
    ("sglang-plain-small", &[]),
    ("sglang-eagle-bigram", &[]),
    ("sglang-namespaces", &[]),
    ("sglang-replay", &[]),
    // Three lives of one worker; in the second recording the clears they begin with are missed.
    ("sglang-restart", &[]),
    ("sglang-restart-idle", &[]),
];

const SGLANG_OLD: &[Row] = &[
    ("sglang-old-0.5.3", &[]),
    ("sglang-old-0.5.10", &[]),
    ("sglang-old-0.5.19", &[]),
    ("sglang-old-0.5.20", &[]),
];

const TIERS: &[Row] =
    &[("sglang-hicache-write-through", &[]), ("sglang-media-classes", &[]), ("vllm-media-classes", &[])];

const RANKS: &[Row] = &[("sglang-attn-dp4", &[])];

const VLLM: &[Row] = &[("vllm-plain-int", &[]), ("vllm-duplicate-blocks", &[]), ("vllm-hybrid-swa", SWA)];

const SWA: &[(&str, &str)] =
    &[("KV_INDEXER_CACHE_COMPONENTS", "full,swa"), ("KV_INDEXER_SWA_WINDOW_TOKENS", "64")];

const COMPONENTS: &[Row] = &[
    ("sglang-swa-components-map", SWA),
    ("sglang-swa-components-array8", SWA),
    ("sglang-mamba-components-map", &[("KV_INDEXER_CACHE_COMPONENTS", "full,mamba")]),
];

/// Recordings, or single streams of them, that following alone cannot bring to the
/// right state, or that have no such state.
const LEFT_OUT: &[(&str, &str)] = &[
    ("sglang-replay late", "joined late: the right state needs a replay"),
    ("synth-malformed", "bad messages: no recorded state; checked message by message at the bridge"),
];

/// The block that says that all before it has arrived.
const MARKER: i64 = i64::MIN + 0x6d61_726b;

/// A recorded hash: SGLang writes signed numbers, vLLM unsigned ones.
fn hash_of(text: &str) -> i64 {
    text.parse().unwrap_or_else(|_| text.parse::<u64>().expect("a hash").cast_signed())
}

fn hashes_of(query: &Value) -> Vec<i64> {
    let hashes = query["hashes"].as_array().expect("hashes");
    hashes.iter().map(|hash| hash_of(hash.as_str().expect("text"))).collect()
}

/// The tier of a recording's medium, its group left aside; the recordings keep what is no local tier too.
fn tier_of(medium: &str) -> Option<i32> {
    match medium.split('/').next() {
        Some("GPU") => Some(1),
        Some("CPU_PINNED") => Some(2),
        Some("DISK") => Some(3),
        Some("EXTERNAL") => None,
        _ => panic!("{medium} is no medium"),
    }
}

/// What a stream's worker must hold in the end.
///
/// Where the recording has the engine's own state, that counts, and where it says
/// what is right after new lives, that; else what its events come to.
fn final_state(capture: &Capture, stream: &Value, components: bool) -> Held {
    let mut state = Held::new();
    if let Some(places) = capture.expected["engine_final_state"].as_array() {
        for place in places {
            let (group, hash) = place.as_str().and_then(|place| place.split_once(' ')).expect("a place");
            // Of two groups, the first is of full attention, the second of a sliding window.
            let component = 1 << group.parse::<u32>().expect("a group");
            *state.entry((1, hash_of(hash))).or_insert(0) |= if components { component } else { 0 };
        }
        return state;
    }
    let right = &capture.expected["right_state"];
    let places = match right {
        Value::Null => state_of(stream),
        _ => state_of(&serde_json::json!({ "final_state": right })),
    };
    let masks = &stream["component_masks"];
    for (medium, hashes) in places {
        let Some(tier) = tier_of(&medium) else { continue };
        for hash in hashes {
            let mask = masks[&hash].as_u64().unwrap_or(0);
            state.insert((tier, hash_of(&hash)), mask.try_into().expect("a mask"));
        }
    }
    state
}

/// Blocks that a worker without components can reuse, from what it holds.
fn run_of(held: &Held, hashes: &[i64]) -> u32 {
    let any_tier = |hash: &&i64| (1..=3).any(|tier| held.contains_key(&(tier, **hash)));
    hashes.iter().take_while(any_tier).count().try_into().expect("a count")
}

/// A query's recorded prefix: by the components' rules, which is what the engine
/// itself reuses; for vLLM what it reuses; else what the events promise over all
/// local tiers, which is what SGLang reuses.
fn recorded(capture: &Capture, query: &Value) -> u32 {
    let by_tiers = query["events_prefix"].as_object().expect("prefixes");
    let (_, union) = by_tiers.iter().max_by_key(|(tiers, _)| tiers.split('+').count()).expect("a tier");
    let blocks = match capture.expected.get("engine_final_state") {
        Some(_) => &query["engine_match_blocks"]["device"],
        None => query.get("seed_rule_prefix").unwrap_or(union),
    };
    blocks.as_u64().and_then(|blocks| u32::try_from(blocks).ok()).expect("a number")
}

/// Every block that a stream ever named.
fn named(capture: &Capture, stream: &str) -> BTreeSet<i64> {
    let mut decoder = Decoder::default();
    let mut named = BTreeSet::new();
    for message in capture.received(stream) {
        let batch = decoder.decode(message.frames.last().expect("a payload")).expect("a batch");
        named.extend(batch.events.iter().flat_map(|event| batch.hashes(event)));
    }
    named
}

fn is_left_out(capture: &str, stream: &str) -> bool {
    LEFT_OUT.iter().any(|(name, _)| *name == capture || *name == format!("{capture} {stream}"))
}

/// A recorded rank on its way: its publisher, its bridge, and what must come of it.
struct Rank {
    stream: String,
    worker: String,
    publisher: Publisher,
    _bridge: Running,
    state: Held,
}

/// Sends a recording through the binaries and compares what comes of it.
async fn check(&(name, variables): &Row) {
    let capture = Capture::read(name);
    let (_server, server) = Running::server("127.0.0.1:0");
    let mut client = client(&server).await;
    let mut ranks = Vec::new();
    for (stream, expected) in capture.streams() {
        if is_left_out(name, &stream) {
            continue;
        }
        let state = final_state(&capture, &expected, !variables.is_empty());
        let publisher = Publisher::bind("").await;
        let worker = stream.replace('/', "-");
        let mut variables = variables.to_vec();
        variables.push(("SGLANG_KV_EVENT_TOPIC", &capture.topic));
        let bridge = Running::bridge(&worker, &server, &publisher.endpoint, &variables);
        ranks.push(Rank { stream, worker, publisher, _bridge: bridge, state });
    }
    for rank in &mut ranks {
        assert_eq!(rank.publisher.joined().await, capture.topic);
    }
    let mut asked = BTreeSet::new();
    for message in capture.messages.iter().filter(|message| message.via == "sub") {
        if let Some(rank) = ranks.iter_mut().find(|rank| rank.stream == message.stream) {
            rank.publisher.send_frames(message.frames.clone()).await;
        }
    }
    for rank in &mut ranks {
        let last = capture.received(&rank.stream).last().expect("a message").frames.clone();
        let sequence = u64::from_be_bytes(last[1][..].try_into().expect("a sequence")) + 1;
        let marker = batch(&[Event::Stored(vec![MARKER])]);
        let frames = vec![last[0].clone(), sequence.to_be_bytes().to_vec().into(), marker.into()];
        rank.publisher.send_frames(frames).await;
        asked.append(&mut named(&capture, &rank.stream));
        asked.extend(rank.state.keys().map(|(_, hash)| *hash));
    }
    assert!(!asked.contains(&MARKER));
    for rank in &ranks {
        wait_for(&mut client, &rank.worker, MARKER).await;
    }

    let found = held(&mut client, asked).await;
    let expected = ranks.iter().filter(|rank| !rank.state.is_empty());
    let expected: BTreeMap<_, _> = expected.map(|rank| (rank.worker.clone(), rank.state.clone())).collect();
    assert_eq!(found, expected, "{name}");

    for query in capture.expected["queries"].as_array().into_iter().flatten() {
        let hashes = hashes_of(query);
        if hashes.is_empty() {
            continue;
        }
        let mut expected = BTreeMap::new();
        for rank in &ranks {
            let asked = query["stream"] == rank.stream.as_str();
            let blocks = if asked { recorded(&capture, query) } else { run_of(&rank.state, &hashes) };
            if blocks > 0 {
                expected.insert(rank.worker.clone(), blocks);
            }
        }
        assert_eq!(prefixes(&mut client, &hashes).await, expected, "{name}: {query}");
    }
}

#[test]
fn no_recording_is_forgotten() {
    let tables = [SGLANG, SGLANG_OLD, TIERS, RANKS, VLLM, COMPONENTS];
    for name in names() {
        let runs = tables.iter().copied().flatten().filter(|(row, _)| *row == name).count();
        let capture = Capture::read(&name);
        let streams = if name == "synth-malformed" { vec![] } else { capture.streams() };
        let whole = !streams.is_empty() && streams.iter().any(|(stream, _)| !is_left_out(&name, stream));
        assert_eq!(runs, usize::from(whole), "{name} must be in one table or left out for a reason");
    }
    let known: BTreeSet<String> = names().into_iter().collect();
    for (name, why) in LEFT_OUT {
        let capture = name.split(' ').next().unwrap_or_default();
        assert!(known.contains(capture), "{name} is left out ({why}) but not there");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_workers_of_sglang() {
    for row in SGLANG {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_dialects_of_sglang() {
    for row in SGLANG_OLD {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_at_every_tier() {
    for row in TIERS {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_a_bridge_each() {
    for row in RANKS {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_vllm() {
    for row in VLLM {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sliding_windows_and_mamba_states() {
    for row in COMPONENTS {
        check(row).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bridge_finds_its_server_again_and_both_stop_when_asked() {
    let (first, address) = Running::server("127.0.0.1:0");
    let mut publisher = Publisher::bind("").await;
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![1, 2, 3])])).await;
    let mut router = client(&address).await;
    wait_for(&mut router, "w0", 3).await;
    assert_eq!(prefixes(&mut router, &[1, 2, 3, 4]).await, BTreeMap::from([("w0".to_owned(), 3)]));
    // A report that is seen may still be unanswered and would be made again. One
    // after the other is under way, so once the next is seen the first is answered.
    publisher.send(batch(&[Event::Stored(vec![7])])).await;
    wait_for(&mut router, "w0", 7).await;

    drop(first);
    let (second, same) = Running::server(&address);
    assert_eq!(same, address);
    let mut router = client(&address).await;
    publisher
        .send(batch(&[Event::Stored(vec![4, 5]), Event::Removed(vec![4]), Event::Stored(vec![6])]))
        .await;
    wait_for(&mut router, "w0", 6).await;
    // What the first server knew is told to the second without any event of the engine.
    wait_for(&mut router, "w0", 1).await;
    let now = held(&mut router, 1..=7).await;
    let expected: Held = [1, 2, 3, 5, 6, 7].into_iter().map(|hash| ((1, hash), 0)).collect();
    assert_eq!(now, BTreeMap::from([("w0".to_owned(), expected)]));
    assert_eq!(bridge.terminate(), Some(0));
    drop(router);
    assert_eq!(second.terminate(), Some(0));
}
