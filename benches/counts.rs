//! What work costs in instructions and bytes: the counts behind `perf/gate`.
//!
//! Counts repeat where times do not. `counts instructions` does each piece of
//! work once between `counting_starts` and `counting_ends`, at which callgrind is
//! told to zero and to write its counters, and prints the pieces' names in order.
//! `counts bytes` prints what an allocator counts, one `name<TAB>number` a line.
//! Both check the answers they count.

use std::hint::black_box;

use sgl_kv_indexer::arena::{Action, Index, PackedHashes, Tier};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

mod workload;
use workload::{PLAIN, Placement, REPORT_HASHES, SWA, Seeded, Workload, act, fill, report, revoke};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

/// One scan of one prompt, by an index that has answered it before.
struct Scan {
    index: Index,
    prompt: Vec<u8>,
    scratch: PrefixScratch,
}

impl Scan {
    fn new(workload: &Workload, placement: Placement) -> Scan {
        let index = Index::new();
        fill(&index, workload, placement);
        let prompt = PackedHashes::pack(&workload.prompts[0]);
        let mut scan = Scan { index, prompt, scratch: PrefixScratch::default() };
        scan.run();
        scan
    }

    /// Scans, and says how many workers matched.
    fn run(&mut self) -> usize {
        let hashes = PackedHashes::new(&self.prompt).expect("packed");
        black_box(prefix(&self.index.read(), hashes, &mut self.scratch));
        self.scratch.matches().len()
    }
}

#[inline(never)]
fn counting_starts() {
    black_box(());
}

#[inline(never)]
fn counting_ends() {
    black_box(());
}

/// Does one piece of work between the marks.
fn count<T>(name: &str, work: impl FnOnce() -> T) -> T {
    counting_starts();
    let answer = work();
    counting_ends();
    println!("{name}");
    answer
}

fn instructions() {
    let scans: [(&str, Workload, Placement, usize); 8] = [
        ("scan 64 blocks, 1 holder", Workload::even(1, 64, 1), PLAIN, 1),
        ("scan 64 blocks, 256 holders", Workload::even(1, 64, 256), PLAIN, 256),
        ("scan 2,000 blocks, 8 holders", Workload::even(1, 2_000, 8), PLAIN, 8),
        ("scan 2,000 blocks, 256 holders", Workload::even(1, 2_000, 256), PLAIN, 256),
        ("scan 100,000 blocks, 64 holders", Workload::even(1, 100_000, 64), PLAIN, 64),
        ("scan 2,000 blocks, 256 holders, SWA", Workload::even(1, 2_000, 256), SWA, 256),
        ("scan 2,000 blocks, 256 ragged holders", Workload::ragged(1, 2_000, 256), PLAIN, 256),
        ("scan a conversation, 64 holders", Workload::conversations(1, 64, 100), PLAIN, 64),
    ];
    for (name, workload, placement, holders) in scans {
        let mut scan = Scan::new(&workload, placement);
        assert_eq!(count(name, || scan.run()), holders, "{name}");
    }
    let mut unknown = Scan::new(&Workload::even(1, 2_000, 8), PLAIN);
    unknown.prompt = PackedHashes::pack(&Seeded::new(2).chain(2_000));
    assert_eq!(count("scan, first block unknown", || unknown.run()), 0);

    let index = Index::new();
    fill(&index, &Workload::even(4, 8 * REPORT_HASHES, 1), PLAIN);
    let mut chain = Seeded::new(3).chain(REPORT_HASHES);
    count("report 16,384 new blocks", || report(&index, 0, &chain, PLAIN));
    count("report 16,384 blocks, second holder", || report(&index, 1, &chain, PLAIN));
    count("report 16,384 blocks again", || report(&index, 0, &chain, PLAIN));
    chain.reverse();
    count("revoke 16,384 blocks tail first", || revoke(&index, 0, &chain));
    assert_eq!(index.read().sizes().blocks, 9 * REPORT_HASHES, "worker 1 still holds them");
    count("clear 131,072 blocks and clean up", || {
        act(&index, 0, None, &[Action::ClearTier { tier: Tier::Hbm }]);
        while index.maintain() {}
    });
    assert_eq!(index.read().sizes().blocks, REPORT_HASHES);
}

/// Bytes that live between two moments.
fn live(region: &Region<'_, std::alloc::System>) -> f64 {
    let change = region.change();
    change.bytes_allocated as f64 - change.bytes_deallocated as f64
}

fn print(name: &str, value: f64) {
    println!("{name}\t{value:.3}");
}

/// Blocks of an index of sessions of 256 blocks, some of which are replaced at random.
fn sessions(index: &Index, seeded: &mut Seeded, count: usize) -> Vec<Vec<i64>> {
    let chains: Vec<Vec<i64>> = (0..count).map(|_| seeded.chain(256)).collect();
    for chain in &chains {
        report(index, 0, chain, PLAIN);
    }
    chains
}

fn bytes(blocks: usize) {
    let mut scan = Scan::new(&Workload::conversations(1, 64, 100), PLAIN);
    let region = Region::new(ALLOCATOR);
    assert_eq!(scan.run(), 64);
    print("allocations of a warm scan", region.change().allocations as f64);
    drop(scan);

    let region = Region::new(ALLOCATOR);
    let index = Index::new();
    let mut seeded = Seeded::new(5);
    let mut chains = sessions(&index, &mut seeded, blocks / 256);
    let held = chains.iter().map(Vec::len).sum::<usize>() as f64;
    let chain_bytes = held * 8.0 + chains.len() as f64 * size_of::<Vec<i64>>() as f64;
    print("bytes per block", (live(&region) - chain_bytes) / held);

    let one_holder = live(&region);
    for worker in 1..64 {
        for chain in &chains {
            report(&index, worker, chain, PLAIN);
        }
    }
    print("bytes per further placement", (live(&region) - one_holder) / (63.0 * held));
    for worker in 1..64 {
        act(&index, worker, None, &[Action::ClearTier { tier: Tier::Hbm }]);
    }
    while index.maintain() {}

    // Replace sessions at random, tail first as engines evict, until all were replaced three times over.
    for _ in 0..3 * chains.len() {
        let place = seeded.below(chains.len());
        chains[place].reverse();
        revoke(&index, 0, &chains[place]);
        chains[place] = seeded.chain(256);
        report(&index, 0, &chains[place], PLAIN);
    }
    while index.maintain() {}
    print("bytes per block after churn", (live(&region) - chain_bytes) / held);

    let before = live(&region);
    let chain = seeded.chain(256);
    for _ in 0..100_000 {
        report(&index, 0, &chain, PLAIN);
        revoke(&index, 0, &chain);
    }
    while index.maintain() {}
    print("growth by storing and removing 100,000 times, percent", 100.0 * (live(&region) - before) / before);

    let peak = live(&region) - chain_bytes;
    act(&index, 0, None, &[Action::ClearTier { tier: Tier::Hbm }]);
    while index.maintain() {}
    print(
        "left after everything is removed, percent of the peak",
        100.0 * (live(&region) - chain_bytes) / peak,
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    match arguments.next().as_deref() {
        Some("instructions") => instructions(),
        Some("bytes") => {
            let blocks = arguments.next().map_or(1_000_000, |text| text.parse().expect("a number of blocks"));
            bytes(blocks);
        }
        _ => eprintln!("usage: counts instructions | bytes [BLOCKS]"),
    }
}
