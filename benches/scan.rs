//! Prefix scans: one axis a group, beside a plain map and a comparison of the same bytes.
//!
//! `cargo bench --bench scan`. Every answer is checked before it is timed.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use sgl_kv_indexer::arena::{Index, PackedHashes};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

mod workload;
use workload::base::PlainIndex;
use workload::{PLAIN, Placement, SWA, Seeded, Workload, fill, report, revoke};

/// One scan; says how many workers matched.
fn scan(index: &Index, prompt: &[u8], scratch: &mut PrefixScratch) -> usize {
    black_box(prefix(&index.read(), PackedHashes::new(prompt).expect("packed"), scratch));
    scratch.matches().len()
}

fn plain_index(workload: &Workload) -> PlainIndex {
    let mut plain = PlainIndex::default();
    for store in &workload.stores {
        plain.report(store.worker as u32, &store.hashes);
    }
    plain
}

/// Times every prompt of a workload in turn, by the index and, where it is asked for, by the map.
fn compare(
    criterion: &mut Criterion,
    group: &str,
    name: &str,
    workload: &Workload,
    placement: Placement,
    base: bool,
) {
    let index = Index::new();
    fill(&index, workload, placement);
    let prompts: Vec<Vec<u8>> = workload.prompts.iter().map(|prompt| PackedHashes::pack(prompt)).collect();
    let plain = plain_index(workload);
    let mut scratch = PrefixScratch::default();
    for (prompt, hashes) in prompts.iter().zip(&workload.prompts).take(4) {
        scan(&index, prompt, &mut scratch);
        let view = index.read();
        let labels = view.labels();
        let mut ours: Vec<(u32, u32)> = scratch
            .matches()
            .iter()
            .map(|found| {
                let label = labels.get(found.worker).expect("a worker");
                (label.id()["worker-".len()..].parse().expect("a number"), found.blocks)
            })
            .collect();
        let mut theirs = plain.prefix(hashes);
        ours.sort_unstable();
        theirs.sort_unstable();
        assert_eq!(ours, theirs, "{group}: {name}");
    }
    let mut group = criterion.benchmark_group(group);
    let mut turn = 0;
    group.bench_function(BenchmarkId::new("index", name), |bencher| {
        bencher.iter(|| {
            // A stride that visits every prompt: no two in a row are neighbours.
            turn = (turn + 7_919) % prompts.len();
            scan(&index, &prompts[turn], &mut scratch)
        });
    });
    if base {
        group.bench_function(BenchmarkId::new("map", name), |bencher| {
            bencher.iter(|| {
                turn = (turn + 7_919) % prompts.len();
                plain.prefix(black_box(&workload.prompts[turn]))
            });
        });
    }
    group.finish();
}

fn by_length(criterion: &mut Criterion) {
    for blocks in [64, 2_000, 100_000, 1_000_000] {
        let workload = Workload::even(1, blocks, 8);
        compare(criterion, "blocks, 8 holders", &blocks.to_string(), &workload, PLAIN, blocks <= 2_000);
        let bytes = PackedHashes::pack(&workload.prompts[0]);
        let same = bytes.clone();
        let mut group = criterion.benchmark_group("blocks, 8 holders");
        group.bench_function(BenchmarkId::new("memcmp", blocks), |bencher| {
            bencher.iter(|| black_box(&bytes) == black_box(&same));
        });
        group.finish();
    }
}

fn by_holders(criterion: &mut Criterion) {
    for holders in [1, 8, 64, 256] {
        let name = holders.to_string();
        compare(criterion, "holders, 2,000 blocks", &name, &Workload::even(1, 2_000, holders), PLAIN, true);
        compare(
            criterion,
            "holders, 2,000 blocks, SWA",
            &name,
            &Workload::even(1, 2_000, holders),
            SWA,
            false,
        );
        compare(
            criterion,
            "holders, 2,000 ragged blocks",
            &name,
            &Workload::ragged(1, 2_000, holders),
            PLAIN,
            true,
        );
    }
}

fn by_sessions(criterion: &mut Criterion) {
    for sessions in [100, 10_000] {
        for sharers in [1, 64] {
            let workload = Workload::conversations(1, sharers, sessions);
            let name = format!("{sessions} sessions, {sharers} workers");
            compare(criterion, "conversations", &name, &workload, PLAIN, true);
        }
    }
}

/// A chain stored in an index whose blocks were all replaced several times over.
fn by_age(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("age, 2,000 blocks");
    for age in ["fresh", "aged"] {
        let index = Index::new();
        let mut seeded = Seeded::new(7);
        let mut sessions: Vec<Vec<i64>> = (0..4_000).map(|_| seeded.chain(256)).collect();
        sessions.iter().for_each(|chain| report(&index, 0, chain, PLAIN));
        let churn = if age == "aged" { 3 * sessions.len() } else { 0 };
        for _ in 0..churn {
            let place = seeded.below(sessions.len());
            sessions[place].reverse();
            revoke(&index, 0, &sessions[place]);
            let blocks = 128 + seeded.below(256);
            sessions[place] = seeded.chain(blocks);
            report(&index, 0, &sessions[place], PLAIN);
        }
        let chain = seeded.chain(2_000);
        chain.chunks(32).for_each(|stretch| report(&index, 0, stretch, PLAIN));
        let prompt = PackedHashes::pack(&chain);
        let mut scratch = PrefixScratch::default();
        assert_eq!(scan(&index, &prompt, &mut scratch), 1);
        assert_eq!(scratch.matches()[0].blocks, 2_000);
        group.bench_function(age, |bencher| bencher.iter(|| scan(&index, &prompt, &mut scratch)));
    }
    group.finish();
}

/// The hash of the n-th block.
type Family = fn(i64) -> i64;

/// Prompts nobody has, over hashes that a plain table would fold together.
fn by_hashes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("unknown prompt, 262,144 blocks held");
    let families: [(&str, Family); 4] = [
        ("random", |n| Seeded::new(n as u64).next() as i64),
        ("dense", |n| n),
        ("multiples of 2^32", |n| n << 32),
        ("equal upper halves", |n| (7 << 40) | n),
    ];
    for (name, hash) in families {
        let index = Index::new();
        let held: Vec<i64> = (0..262_144).map(hash).collect();
        held.chunks(workload::REPORT_HASHES).for_each(|hashes| report(&index, 0, hashes, PLAIN));
        let unknown: Vec<Vec<u8>> = (262_144..266_240).map(|n| PackedHashes::pack(&[hash(n)])).collect();
        let mut scratch = PrefixScratch::default();
        assert_eq!(scan(&index, &unknown[0], &mut scratch), 0, "{name}");
        let mut turn = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                turn = (turn + 1_021) % unknown.len();
                scan(&index, &unknown[turn], &mut scratch)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, by_length, by_holders, by_sessions, by_age, by_hashes);
criterion_main!(benches);
