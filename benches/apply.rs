//! Reports, revokes and clears: rates beside a plain map, and the longest single apply.
//!
//! `cargo bench --bench apply`. The last lines are maxima, printed and not
//! compared: how long one apply of 16,384 hashes took at most while the index grew
//! to a million blocks, and how long readers waited while a million were cleared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sgl_kv_indexer::arena::{Action, Index, Tier};

mod workload;
use workload::base::PlainIndex;
use workload::{PLAIN, REPORT_HASHES, Seeded, act, report, revoke};

const BLOCKS: usize = 65_536;

/// Stretches of a length that make up [`BLOCKS`] blocks.
fn stretches(length: usize) -> Vec<Vec<i64>> {
    let mut seeded = Seeded::new(11);
    (0..BLOCKS / length).map(|_| seeded.chain(length)).collect()
}

fn filled(stretches: &[Vec<i64>]) -> Index {
    let index = Index::new();
    stretches.iter().for_each(|hashes| report(&index, 0, hashes, PLAIN));
    assert_eq!(index.read().sizes().blocks, BLOCKS);
    index
}

fn rates(criterion: &mut Criterion) {
    for length in [1, 32, 1_024] {
        let stretches = stretches(length);
        let mut group = criterion.benchmark_group(format!("stretches of {length}"));
        group.throughput(Throughput::Elements(BLOCKS as u64)).sample_size(10);
        group.bench_function(BenchmarkId::new("report new", "index"), |bencher| {
            bencher.iter_batched(
                Index::new,
                |index| {
                    stretches.iter().for_each(|hashes| report(&index, 0, hashes, PLAIN));
                    index
                },
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("report new", "map"), |bencher| {
            bencher.iter_batched(
                PlainIndex::default,
                |mut plain| {
                    stretches.iter().for_each(|hashes| plain.report(0, hashes));
                    plain
                },
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("report second holder", "index"), |bencher| {
            bencher.iter_batched(
                || filled(&stretches),
                |index| {
                    stretches.iter().for_each(|hashes| report(&index, 1, hashes, PLAIN));
                    index
                },
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("revoke tail first", "index"), |bencher| {
            let backwards: Vec<Vec<i64>> =
                stretches.iter().map(|hashes| hashes.iter().rev().copied().collect()).collect();
            bencher.iter_batched(
                || filled(&stretches),
                |index| {
                    backwards.iter().for_each(|hashes| revoke(&index, 0, hashes));
                    assert_eq!(index.read().sizes().blocks, 0);
                    index
                },
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("clear", "index"), |bencher| {
            bencher.iter_batched(
                || filled(&stretches),
                |index| {
                    act(&index, 0, None, &[Action::ClearTier { tier: Tier::Hbm }]);
                    while index.maintain() {}
                    index
                },
                BatchSize::LargeInput,
            );
        });
        group.finish();
    }
}

/// The longest of the applies that fill an index, and the longest wait of a reader.
fn maxima(_: &mut Criterion) {
    let index = Arc::new(Index::new());
    let mut seeded = Seeded::new(13);
    let mut longest = Duration::ZERO;
    for _ in 0..1_000_000 / REPORT_HASHES {
        let chain = seeded.chain(REPORT_HASHES);
        let start = Instant::now();
        report(&index, 0, &chain, PLAIN);
        longest = longest.max(start.elapsed());
    }
    println!("longest apply of {REPORT_HASHES} new blocks up to a million: {longest:?}");

    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (index, done) = (Arc::clone(&index), Arc::clone(&done));
        std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                drop(index.read());
                longest = longest.max(start.elapsed());
            }
            longest
        })
    };
    act(&index, 0, None, &[Action::ClearTier { tier: Tier::Hbm }]);
    while index.maintain() {}
    done.store(true, Ordering::Relaxed);
    println!("longest wait of a reader while a million are cleared: {:?}", reader.join().expect("a reader"));
    assert_eq!(index.read().sizes().blocks, 0);
}

criterion_group!(benches, rates, maxima);
criterion_main!(benches);
