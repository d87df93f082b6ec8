//! What the index holds on to, beside the plain index, and what growing and giving back cost.
//!
//! Bytes are exact, so they are printed once, as a table along one axis each;
//! criterion times the filling and the clearing of the same workloads. The
//! index's answers to the workload are compared with the plain index's first.
//! Bytes are those asked of the allocator, and do not count its own overhead.

mod workload;

use std::alloc::System;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sgl_kv_indexer::arena::Index;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use workload::base::Base;
use workload::{PLAIN, Prepared, Seeded, Workload, answer, fill, settle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    targets = blocks, holders, session, spread
}
criterion_main!(benches);

fn blocks(criterion: &mut Criterion) {
    let cases = [10_000, 100_000, 1_000_000].map(|blocks| (blocks, sessions(1, blocks, 1, 512)));
    table(criterion, "blocks in sessions of 512, one holder", cases);
}

fn holders(criterion: &mut Criterion) {
    let cases = [1, 2, 8, 64].map(|holders| (holders, sessions(2, 100_000, holders, 512)));
    table(criterion, "holders of 100,000 blocks in sessions of 512", cases);
}

fn session(criterion: &mut Criterion) {
    let cases = [1, 8, 32, 512].map(|session| (session, sessions(3, 100_000, 2, session)));
    table(criterion, "blocks of a session, 100,000 blocks, two holders", cases);
}

/// The worst there is: any two neighbours have other holders.
fn spread(criterion: &mut Criterion) {
    let cases = [1, 2, 4].map(|holders| {
        let mut seeded = Seeded::new(4);
        let mut workload = Workload::default();
        let chain = seeded.chain(100_000);
        for _ in 0..holders {
            for place in 0..chain.len() {
                workload.store(seeded.below(64), &chain, place, place + 1);
            }
        }
        workload.prompts = chain.chunks(1_000).map(<[i64]>::to_vec).collect();
        (holders, workload)
    });
    table(criterion, "random holders of each of 100,000 blocks", cases);
}

/// `blocks` blocks in sessions of `session`, each held by `holders` neighbours of 64 workers.
fn sessions(seed: u64, blocks: usize, holders: usize, session: usize) -> Workload {
    let mut seeded = Seeded::new(seed);
    let mut workload = Workload::default();
    for number in 0..blocks / session {
        let chain = seeded.chain(session);
        for holder in 0..holders {
            workload.store((number + holder) % 64, &chain, 0, session);
        }
        workload.prompts.push(chain);
    }
    workload
}

fn table<const CASES: usize>(criterion: &mut Criterion, axis: &str, cases: [(usize, Workload); CASES]) {
    let mut group = criterion.benchmark_group(format!("memory/{axis}"));
    println!("\nmemory/{axis}: bytes per placement, ours, base, left after a clear in percent");
    for (place, workload) in &cases {
        let placements: usize = workload.stores.iter().map(|store| store.hashes.len()).sum();
        let start = held();
        let base = Base::of(workload);
        let base_bytes = held() - start;
        let start = held();
        let index = Index::new();
        fill(&index, workload, PLAIN);
        let bytes = held() - start;
        for prompt in workload.prompts.iter().take(1_000) {
            assert_eq!(answer(&index, prompt), base.prefix(prompt), "the two indexes differ");
        }
        clear(&index);
        let left = held() - start;
        println!(
            "{place}\t{:.2}\t{:.2}\t{:.2}",
            bytes as f64 / placements as f64,
            base_bytes as f64 / placements as f64,
            100.0 * left as f64 / bytes as f64
        );

        group.throughput(Throughput::Elements(placements as u64));
        for (name, timed) in [("fill", Timed::Fill), ("clear", Timed::Clear)] {
            group.bench_function(BenchmarkId::new(name, place), |bencher| {
                bencher.iter_custom(|runs| (0..runs).map(|_| life(&index, workload, timed)).sum());
            });
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Timed {
    Fill,
    Clear,
}

fn life(index: &Index, workload: &Workload, timed: Timed) -> Duration {
    let start = Instant::now();
    fill(index, workload, PLAIN);
    let filled = Instant::now();
    clear(index);
    if timed == Timed::Fill { filled - start } else { filled.elapsed() }
}

fn clear(index: &Index) {
    for worker in 0..64 {
        Prepared::clear(worker, PLAIN).apply(index);
    }
    settle(index);
    assert_eq!(index.read().sizes().blocks, 0, "nothing is left");
}

/// Bytes taken from the allocator and not given back.
fn held() -> isize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}
