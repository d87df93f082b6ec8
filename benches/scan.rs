//! What a prefix scan costs, along one axis per group.
//!
//! Each answer is compared with the plain index's before it is timed. `base` is
//! that index, `memcmp` compares two ranges of the prompt's size, which is the
//! least that an exact scan has to do.

mod workload;

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sgl_kv_indexer::arena::{Index, PackedHashes, Tier};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use workload::base::Base;
use workload::engines::Engines;
use workload::{
    Fleet, Kinds, PLAIN, SWA, Seeded, Workload, answer, at, branch, fill, gather, report, settle,
};

/// The binaries' allocator: it backs the index with huge pages where the system lets it, the system's own does not.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = length, holders, shape, conversation, unknown, spec, age, decoding, hashes
}
criterion_main!(benches);

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Blocks of a fleet that comes and goes.
const FLEET_BLOCKS: usize = 300_000;

fn length(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/length, 8 holders");
    for blocks in [64, 2_000, 100_000, 1_000_000] {
        let workload = Workload::even(1, blocks, 8);
        group.throughput(Throughput::Elements(blocks as u64));
        beside_base(&mut group, &blocks.to_string(), &workload);
        memcmp(&mut group, &blocks.to_string(), &workload.prompts[0]);
    }
}

fn holders(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/holders, 2000 blocks");
    for holders in [1, 8, 64, 256] {
        beside_base(&mut group, &holders.to_string(), &Workload::even(2, 2_000, holders));
    }
}

fn shape(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/shape, 2000 blocks, 256 holders");
    beside_base(&mut group, "even", &Workload::even(3, 2_000, 256));
    let workload = Workload::ragged(3, 2_000, 256);
    beside_base(&mut group, "ragged", &workload);
    let index = filled(&workload);
    branch(&index, &workload, 4);
    check(&index, &Base::of(&workload), &workload.prompts);
    ours(&mut group, "ragged after branches", &index, &workload.prompts);
}

fn conversation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/conversation, holders of the first 256 blocks");
    for sharers in [1, 8, 64] {
        beside_base(&mut group, &sharers.to_string(), &Workload::conversations(5, sharers, 1_000));
    }
    drop(group);
    let mut group = criterion.benchmark_group("scan/conversation decoded block by block, sessions");
    for sessions in [100, 1_000, 8_000] {
        let workload = Workload::decoded(5, 8, sessions);
        beside_base(&mut group, &sessions.to_string(), &workload);
        let index = filled(&workload);
        gather(&index, &workload.prompts);
        ours(&mut group, &format!("{sessions}, asked before"), &index, &workload.prompts);
    }
}

fn unknown(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/first block unknown, blocks in the index");
    let prompts: Vec<Vec<i64>> = (0..10_000).map(|seed| Seeded::new(seed << 32).chain(64)).collect();
    for blocks in [10_000, 1_000_000, 4_000_000] {
        let index = Index::new();
        let mut seeded = Seeded::new(6);
        for _ in 0..blocks / 1_000 {
            report(&index, 0, &seeded.chain(1_000), PLAIN);
        }
        assert!(prompts.iter().all(|prompt| answer(&index, prompt).is_empty()), "nobody knows these");
        ours(&mut group, &blocks.to_string(), &index, &prompts);
    }
}

fn spec(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/cache spec, 2000 blocks, 64 holders");
    let workload = Workload::even(7, 2_000, 64);
    let base = Base::of(&workload);
    let plain = filled(&workload);
    let swa = Index::new();
    fill(&swa, &workload, SWA);
    let tiers = Index::new();
    fill(&tiers, &workload, SWA);
    for store in workload.stores.iter().filter(|store| store.worker % 2 == 0) {
        report(&tiers, store.worker, &store.hashes[..1_000], at(Tier::Dram, SWA));
    }
    for (name, index) in [("none", plain), ("full and swa", swa), ("full and swa, two tiers", tiers)] {
        check(&index, &base, &workload.prompts);
        ours(&mut group, name, &index, &workload.prompts);
    }
}

fn age(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/age, sessions of 32 to 512 blocks");
    let aged = Index::new();
    let mut fleet = Fleet::new(8, 64, FLEET_BLOCKS, &aged);
    fleet.churn(&aged, 9);
    settle(&aged);
    let fresh = fleet.fresh();
    let asked = |fleet: &Fleet| {
        let mut prompts: Vec<Vec<i64>> = fleet.live.iter().map(|session| session.chain.clone()).collect();
        Seeded::new(9).shuffle(&mut prompts);
        prompts
    };
    let prompts = asked(&fleet);
    for session in &fleet.live {
        let rows = answer(&aged, &session.chain);
        assert_eq!(rows, answer(&fresh, &session.chain), "a past changed an answer");
        assert_eq!(rows.len(), session.workers.len(), "holders of a session");
    }
    ours(&mut group, "fresh", &fresh, &prompts);
    ours(&mut group, "90 % replaced", &aged, &prompts);
    for _ in 0..3 {
        fleet.churn(&aged, 9);
    }
    ours(&mut group, "90 % replaced four times", &aged, &asked(&fleet));
}

fn decoding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/age, sessions that engines decode in turn");
    for (name, maintained) in [("never maintained", false), ("maintained", true)] {
        let index = Index::new();
        let mut engines = Engines::new(11, FLEET_BLOCKS, maintained);
        engines.run(&index, FLEET_BLOCKS);
        ours(&mut group, &format!("fresh, {name}"), &index, &engines.prompts());
        engines.run(&index, 4 * FLEET_BLOCKS);
        ours(&mut group, &format!("replaced four times, {name}"), &index, &engines.prompts());
    }
}

fn hashes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan/hashes, 300,000 blocks asked in random order");
    for (name, kind) in Kinds::ALL {
        let index = Index::new();
        let mut hashes = kind.chain(0, FLEET_BLOCKS);
        for stretch in hashes.chunks(1_000) {
            report(&index, 0, stretch, PLAIN);
        }
        // In random order every guess fails, so that the table's share shows.
        Seeded::new(10).shuffle(&mut hashes);
        let prompts: Vec<Vec<i64>> = hashes.chunks(1_000).map(<[i64]>::to_vec).collect();
        assert!(prompts.iter().all(|prompt| answer(&index, prompt) == [(0, 1_000)]), "all are held");
        ours(&mut group, name, &index, &prompts);
    }
}

fn filled(workload: &Workload) -> Index {
    let index = Index::new();
    fill(&index, workload, PLAIN);
    index
}

fn check(index: &Index, base: &Base, prompts: &[Vec<i64>]) {
    for prompt in prompts {
        assert_eq!(answer(index, prompt), base.prefix(prompt), "the two indexes differ");
    }
}

fn beside_base(group: &mut Group<'_>, name: &str, workload: &Workload) {
    let index = filled(workload);
    let base = Base::of(workload);
    check(&index, &base, &workload.prompts);
    ours(group, name, &index, &workload.prompts);
    let mut prompts = workload.prompts.iter().cycle();
    group.bench_function(BenchmarkId::new("base", name), |bencher| {
        bencher.iter(|| black_box(base.prefix(prompts.next().expect("a prompt"))));
    });
}

fn ours(group: &mut Group<'_>, name: &str, index: &Index, prompts: &[Vec<i64>]) {
    let packed: Vec<Vec<u8>> = prompts.iter().map(|prompt| PackedHashes::pack(prompt)).collect();
    let mut turn = packed.iter().cycle();
    let mut scratch = PrefixScratch::default();
    group.bench_function(BenchmarkId::new("ours", name), |bencher| {
        bencher.iter(|| {
            let view = index.read();
            let prompt = PackedHashes::new(turn.next().expect("a prompt")).expect("packed");
            prefix(&view, prompt, &mut scratch);
            black_box(scratch.matches().len())
        });
    });
}

fn memcmp(group: &mut Group<'_>, name: &str, prompt: &[i64]) {
    let request = PackedHashes::pack(prompt);
    let column = request.clone();
    group.bench_function(BenchmarkId::new("memcmp", name), |bencher| {
        bencher.iter(|| assert!(black_box(&column) == black_box(&request)));
    });
}
