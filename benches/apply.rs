//! What applies cost, along one axis per group.
//!
//! A run reports blocks that no run before has named, takes them back, and times
//! one of the two. How much the index holds is checked after each half. `base` is
//! the plain index.

mod workload;

use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sgl_kv_indexer::arena::{Index, Tier};

use workload::base::Base;
use workload::{Fleet, Kinds, PLAIN, Prepared, REPORT_HASHES, Seeded, report, settle, worker_name};

/// The binaries' allocator: it backs the index with huge pages where the system lets it, the system's own does not.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    targets = report_stretch, report_holders, revoke_stretch, revoke_order, clear, hashes
}
criterion_main!(benches);

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Blocks that stand in the index before.
const STANDING_BLOCKS: usize = 300_000;

/// Blocks applied in one run.
const BLOCKS: usize = 16_384;

/// A worker of no other number in here.
const WORKER: usize = 1_000;

fn report_stretch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/report new blocks, stretch");
    for stretch in [1, 32, 512, REPORT_HASHES] {
        there_and_back(&mut group, &stretch.to_string(), Timed::There, stretch, Order::Tail, 0);
    }
}

fn report_holders(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/report stretches of 32, holders before");
    for holders in [0, 1, 8, 64, 255] {
        there_and_back(&mut group, &holders.to_string(), Timed::There, 32, Order::Tail, holders);
    }
}

fn revoke_stretch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/revoke tail first, stretch");
    for stretch in [1, 32, 512, REPORT_HASHES] {
        there_and_back(&mut group, &stretch.to_string(), Timed::Back, stretch, Order::Tail, 0);
    }
}

fn revoke_order(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/revoke by 32, order");
    for (name, order) in [("head", Order::Head), ("tail", Order::Tail), ("random", Order::Random)] {
        there_and_back(&mut group, name, Timed::Back, 32, order, 0);
    }
}

fn hashes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/report new stretches of 32, hashes");
    for (name, kind) in Kinds::ALL {
        let index = Index::new();
        for stretch in kind.chain(0, STANDING_BLOCKS).chunks(1_000) {
            report(&index, 0, stretch, PLAIN);
        }
        group.throughput(Throughput::Elements(BLOCKS as u64));
        // Numbers come around after a long time, long after the index forgot them.
        let mut run = 0;
        let mut chain = |_: &Index| {
            run = run % 900 + 1;
            kind.chain(STANDING_BLOCKS + run * BLOCKS, BLOCKS)
        };
        ours(&mut group, name, Timed::There, &index, &mut chain, 32, Order::Tail);
    }
}

fn clear(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply/clear a worker and clean up, blocks");
    for blocks in [10_000, 100_000, 1_000_000] {
        let index = standing();
        let held = index.read().sizes().blocks;
        let mut seeded = Seeded::new(5);
        let clear = Prepared::clear(WORKER, PLAIN);
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(BenchmarkId::new("ours", blocks), |bencher| {
            bencher.iter_custom(|runs| {
                (0..runs)
                    .map(|_| {
                        let chain = seeded.chain(blocks);
                        reports(&chain, 512).iter().for_each(|batch| batch.apply(&index));
                        assert_eq!(holdings(&index), blocks as u64);
                        let start = Instant::now();
                        clear.apply(&index);
                        settle(&index);
                        let spent = start.elapsed();
                        assert_eq!(index.read().sizes().blocks, held);
                        spent
                    })
                    .sum()
            });
        });
        let mut base = Base::default();
        base.store(0, &Seeded::new(6).chain(STANDING_BLOCKS));
        let chain = Seeded::new(5).chain(blocks);
        group.bench_function(BenchmarkId::new("base", blocks), |bencher| {
            bencher.iter_custom(|runs| {
                (0..runs)
                    .map(|_| {
                        base.store(WORKER, &chain);
                        let start = Instant::now();
                        base.clear(WORKER);
                        let spent = start.elapsed();
                        assert_eq!(base.len(), STANDING_BLOCKS);
                        spent
                    })
                    .sum()
            });
        });
    }
}

/// Which half of a run is timed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timed {
    There,
    Back,
}

/// In which order the blocks of a chain are taken back.
#[derive(Clone, Copy)]
enum Order {
    Head,
    Tail,
    Random,
}

fn there_and_back(
    group: &mut Group<'_>,
    name: &str,
    timed: Timed,
    stretch: usize,
    order: Order,
    holders: usize,
) {
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let index = standing();
    let mut seeded = Seeded::new(9);
    let mut chain = |index: &Index| {
        let chain = seeded.chain(BLOCKS);
        for holder in 100..100 + holders {
            chain.chunks(512).for_each(|hashes| report(index, holder, hashes, PLAIN));
        }
        chain
    };
    ours(group, name, timed, &index, &mut chain, stretch, order);

    let mut base = Base::default();
    base.store(0, &Seeded::new(6).chain(STANDING_BLOCKS));
    let mut seeded = Seeded::new(9);
    group.bench_function(BenchmarkId::new("base", name), |bencher| {
        bencher.iter_custom(|runs| {
            let mut spent = Duration::ZERO;
            for _ in 0..runs {
                let chain = seeded.chain(BLOCKS);
                (100..100 + holders).for_each(|holder| base.store(holder, &chain));
                let back = ordered(&chain, order);
                let start = Instant::now();
                chain.chunks(stretch).for_each(|hashes| base.store(WORKER, hashes));
                let middle = Instant::now();
                back.chunks(stretch).for_each(|hashes| base.remove(WORKER, hashes));
                spent += if timed == Timed::There { middle - start } else { middle.elapsed() };
                (100..100 + holders).for_each(|holder| base.remove(holder, &chain));
                assert_eq!(base.len(), STANDING_BLOCKS, "all is undone");
            }
            spent
        });
    });
}

/// `chain` makes the blocks of a run, with the holders that they have before.
fn ours(
    group: &mut Group<'_>,
    name: &str,
    timed: Timed,
    index: &Index,
    chain: &mut dyn FnMut(&Index) -> Vec<i64>,
    stretch: usize,
    order: Order,
) {
    group.bench_function(BenchmarkId::new("ours", name), |bencher| {
        bencher.iter_custom(|runs| {
            let mut spent = Duration::ZERO;
            for _ in 0..runs {
                let chain = chain(index);
                let (there, back) = (reports(&chain, stretch), revokes(&chain, stretch, order));
                let start = Instant::now();
                there.iter().for_each(|batch| batch.apply(index));
                let middle = Instant::now();
                assert_eq!(holdings(index), BLOCKS as u64, "all is reported");
                let resumed = Instant::now();
                back.iter().for_each(|batch| batch.apply(index));
                spent += if timed == Timed::There { middle - start } else { resumed.elapsed() };
                assert_eq!(holdings(index), 0, "all is undone");
                forget_holders(index);
            }
            spent
        });
    });
}

/// Clears the workers that a run's chain had before, numbered from 100.
fn forget_holders(index: &Index) {
    let known = |holder: &usize| index.read().find_worker(&worker_name(*holder)).is_some();
    (100..WORKER).take_while(known).for_each(|holder| Prepared::clear(holder, PLAIN).apply(index));
    settle(index);
}

fn standing() -> Index {
    let index = Index::new();
    Fleet::new(7, 64, STANDING_BLOCKS, &index);
    index
}

fn holdings(index: &Index) -> u64 {
    let view = index.read();
    view.find_worker(&worker_name(WORKER)).map_or(0, |worker| view.holdings(worker, Tier::Hbm))
}

fn reports(chain: &[i64], stretch: usize) -> Vec<Prepared> {
    chain.chunks(stretch).map(|hashes| Prepared::report(WORKER, hashes, PLAIN)).collect()
}

fn revokes(chain: &[i64], stretch: usize, order: Order) -> Vec<Prepared> {
    ordered(chain, order).chunks(stretch).map(|hashes| Prepared::revoke(WORKER, hashes, PLAIN)).collect()
}

fn ordered(chain: &[i64], order: Order) -> Vec<i64> {
    let mut hashes = chain.to_vec();
    match order {
        Order::Head => {}
        Order::Tail => hashes.reverse(),
        Order::Random => Seeded::new(8).shuffle(&mut hashes),
    }
    hashes
}
