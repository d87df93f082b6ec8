//! What reading events costs, in blocks: stores of one block and of 32, with 64 token ids a block,
//! as arrays and as maps.
//!
//! Each batch has 64 blocks, so that the groups differ in how they are told and in nothing else. `ours`
//! reads a payload and then every hash; `base` is a general library, which reads the same payload into
//! owned values of exactly its shape. Both must find the same hashes before they are timed.

mod workload;

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rmp::encode;
use serde::Deserialize;
use sgl_kv_indexer::bridge::event::{Change, Decoder};
use sgl_kv_indexer::pb::TierType as Tier;

use workload::Seeded;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = decode
}
criterion_main!(benches);

/// Blocks of one batch.
const BATCH_BLOCKS: usize = 64;
/// Token ids of one block.
const BLOCK_TOKENS: usize = 64;
/// Size of a vocabulary: most ids take four bytes and a marker, as engines' do.
const VOCABULARY: usize = 150_000;
/// Batches that take turns, more than a cache of the first level holds.
const BATCHES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    Array,
    Map,
}

/// Events as the library reads them from arrays.
type Arrays = (f64, Vec<(String, Vec<i64>, Option<i64>, Vec<u32>, u32, Option<u32>, Option<String>)>, u32);

/// An event as the library reads it from a map.
#[derive(Debug, Deserialize)]
struct Map {
    r#type: String,
    block_hashes: Vec<i64>,
    parent_block_hash: Option<i64>,
    token_ids: Vec<u32>,
    block_size: u32,
    lora_id: Option<u32>,
    medium: Option<String>,
}

fn payload(seeded: &mut Seeded, dialect: Dialect, store_blocks: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let write = &mut out;
    encode::write_array_len(write, 3).unwrap();
    encode::write_f64(write, 1_700_000_000.5).unwrap();
    let events = BATCH_BLOCKS / store_blocks;
    encode::write_array_len(write, events as u32).unwrap();
    for _ in 0..events {
        let key = |write: &mut Vec<u8>, name: &str| {
            if dialect == Dialect::Map {
                encode::write_str(write, name).unwrap();
            }
        };
        match dialect {
            Dialect::Array => encode::write_array_len(write, 7).map(drop).unwrap(),
            Dialect::Map => encode::write_map_len(write, 7).map(drop).unwrap(),
        }
        key(write, "type");
        encode::write_str(write, "BlockStored").unwrap();
        key(write, "block_hashes");
        encode::write_array_len(write, store_blocks as u32).unwrap();
        for hash in seeded.chain(store_blocks) {
            encode::write_sint(write, hash).unwrap();
        }
        key(write, "parent_block_hash");
        encode::write_sint(write, seeded.next() as i64).unwrap();
        key(write, "token_ids");
        let tokens = store_blocks * BLOCK_TOKENS;
        encode::write_array_len(write, tokens as u32).unwrap();
        for _ in 0..tokens {
            encode::write_uint(write, seeded.below(VOCABULARY) as u64).unwrap();
        }
        key(write, "block_size");
        encode::write_uint(write, BLOCK_TOKENS as u64).unwrap();
        key(write, "lora_id");
        encode::write_nil(write).unwrap();
        key(write, "medium");
        encode::write_str(write, "GPU").unwrap();
    }
    encode::write_uint(write, 0).unwrap();
    out
}

/// All hashes of a payload, by our decoder; the sum stands for handing them on.
fn ours(decoder: &mut Decoder, payload: &[u8]) -> (usize, i64) {
    let batch = decoder.decode(payload).expect("a batch");
    batch.events.iter().flat_map(|event| batch.hashes(event)).fold((0, 0), add)
}

/// The same by the library.
fn base(dialect: Dialect, payload: &[u8]) -> (usize, i64) {
    match dialect {
        Dialect::Array => {
            let (_, events, _): Arrays = rmp_serde::from_slice(payload).expect("a batch");
            black_box(&events);
            events.iter().flat_map(|event| event.1.iter().copied()).fold((0, 0), add)
        }
        Dialect::Map => {
            let (_, events, _): (f64, Vec<Map>, u32) = rmp_serde::from_slice(payload).expect("a batch");
            black_box(&events);
            events.iter().flat_map(|event| event.block_hashes.iter().copied()).fold((0, 0), add)
        }
    }
}

fn add((blocks, sum): (usize, i64), hash: i64) -> (usize, i64) {
    (blocks + 1, sum.wrapping_add(hash))
}

/// Both readers find every block, and the rest of what a payload says.
fn check(dialect: Dialect, payload: &[u8]) {
    let mut decoder = Decoder::default();
    let found = ours(&mut decoder, payload);
    assert_eq!(found, base(dialect, payload), "the two readers differ");
    assert_eq!(found.0, BATCH_BLOCKS);
    let batch = decoder.decode(payload).expect("a batch");
    let stored = Change::Stored { tier: Tier::TierHbm, mask: 0, block_tokens: BLOCK_TOKENS as u32 };
    assert!(batch.events.iter().all(|event| event.change == stored) && batch.rank == Some(0));
    if dialect == Dialect::Map {
        let (_, events, _): (f64, Vec<Map>, u32) = rmp_serde::from_slice(payload).expect("a batch");
        assert!(events.iter().all(|event| {
            let tokens = event.token_ids.len() == event.block_hashes.len() * BLOCK_TOKENS;
            let plain = event.lora_id.is_none() && event.parent_block_hash.is_some();
            let stored = event.r#type == "BlockStored" && event.medium.as_deref() == Some("GPU");
            tokens && plain && stored && event.block_size as usize == BLOCK_TOKENS
        }));
    }
}

fn decode(criterion: &mut Criterion) {
    for (dialect, name) in [(Dialect::Array, "arrays"), (Dialect::Map, "maps")] {
        let mut group = criterion.benchmark_group(format!("decode/{name}, blocks of a store"));
        group.throughput(Throughput::Elements(BATCH_BLOCKS as u64));
        for store_blocks in [1, 32] {
            let mut seeded = Seeded::new(store_blocks as u64);
            let payloads: Vec<Vec<u8>> =
                (0..BATCHES).map(|_| payload(&mut seeded, dialect, store_blocks)).collect();
            payloads.iter().for_each(|payload| check(dialect, payload));
            let mut decoder = Decoder::default();
            let mut turn = payloads.iter().cycle();
            group.bench_function(BenchmarkId::new("ours", store_blocks), |bencher| {
                bencher.iter(|| ours(&mut decoder, black_box(turn.next().expect("a payload"))));
            });
            let mut turn = payloads.iter().cycle();
            group.bench_function(BenchmarkId::new("base", store_blocks), |bencher| {
                bencher.iter(|| base(dialect, black_box(turn.next().expect("a payload"))));
            });
        }
    }
}
