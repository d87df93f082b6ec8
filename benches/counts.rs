//! Instructions, heap blocks and bytes of fixed pieces of work.
//!
//! `perf/gate` runs this twice: as it is, which prints heap counts, and with
//! `instructions` under callgrind, which counts what runs inside [`measured`] and
//! dumps once per scenario, in the order in which the names are printed. Counts
//! do not depend on what else the machine does, so they can be gated.
//!
//! Every line is `scenario<TAB>quantity<TAB>count`.

mod workload;

use std::alloc::System;
use std::hint::black_box;

use sgl_kv_indexer::arena::{Index, Keys, PackedHashes, Tier, Tuning};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};
use stats_alloc::{INSTRUMENTED_SYSTEM, Stats, StatsAlloc};

use workload::{
    Fleet, PLAIN, Placement, Prepared, SWA, Seeded, Workload, answer, at, fill, gather, report, settle,
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Blocks of the memory scenarios unless an argument says otherwise.
const MEMORY_BLOCKS: usize = 1_000_000;

/// Blocks that stand in the index before an apply is counted.
const STANDING_BLOCKS: usize = 100_000;

/// Blocks of one counted apply scenario.
const APPLIED_BLOCKS: usize = 8_192;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["instructions"] => scenarios(&mut |name, mut work| {
            println!("{name}");
            measured(&mut *work);
        }),
        [] => {
            scenarios(&mut |name, mut work| {
                let before = ALLOCATOR.stats();
                measured(&mut *work);
                let spent = ALLOCATOR.stats() - before;
                println!("{name}\tallocations\t{}", spent.allocations + spent.reallocations);
            });
            memory(MEMORY_BLOCKS);
        }
        ["memory", blocks] => memory(blocks.parse().expect("a number of blocks")),
        _ => panic!("arguments: none, `instructions`, or `memory BLOCKS`"),
    }
}

/// What callgrind's `--toggle-collect` names: all that is counted runs in here.
#[inline(never)]
fn measured(work: &mut dyn FnMut()) {
    work();
}

/// Receives each scenario, set up and warm; what it does is to be counted once.
type Visit<'a> = dyn FnMut(&str, Box<dyn FnMut() + '_>) + 'a;

fn scenarios(visit: &mut Visit<'_>) {
    scans(visit);
    applies(visit);
}

fn scans(visit: &mut Visit<'_>) {
    for blocks in [64, 2_000, 100_000] {
        for holders in [1, 64, 256] {
            let workload = Workload::even(1, blocks, holders);
            let index = filled(&workload, PLAIN);
            let name = format!("scan/even/{blocks}x{holders}");
            scan(visit, &name, &index, &workload.prompts, Answers { matches: holders, best: blocks });
        }
    }

    let workload = Workload::ragged(2, 2_000, 256);
    let index = filled(&workload, PLAIN);
    scan(visit, "scan/ragged/2000x256", &index, &workload.prompts, Answers { matches: 256, best: 2_000 });
    for worker in 0..64 {
        Prepared::revoke(worker, &workload.prompts[0][..1], PLAIN).apply(&index);
    }
    let best = (64..256).map(|worker| blocks_of(&workload, worker)).max().expect("192 of them");
    let others = Answers { matches: 192, best };
    scan(visit, "scan/ragged, 64 of them without the head/2000x256", &index, &workload.prompts, others);
    let index = filled(&workload, PLAIN);
    let block = &workload.prompts[0][7..8];
    let changes = [Prepared::revoke(0, block, PLAIN), Prepared::report(0, block, PLAIN)];
    let name = "scan/ragged, after each of two changes/2000x256";
    scan_between(visit, name, &index, &workload.prompts[0], &changes);
    let index = filled(&workload, SWA);
    scan(
        visit,
        "scan/ragged, swa/2000x256",
        &index,
        &workload.prompts,
        Answers { matches: 256, best: 2_000 },
    );

    let workload = Workload::even(1, 2_000, 256);
    let index = filled(&workload, PLAIN);
    let odd: Vec<i64> = workload.prompts[0].iter().skip(1).step_by(2).copied().collect();
    report(&index, 256, &odd, PLAIN);
    let all = Answers { matches: 256, best: 2_000 };
    scan(visit, "scan/even, one more comes and goes/2000x256", &index, &workload.prompts, all);

    let workload = Workload::conversations(3, 64, 256);
    let index = filled(&workload, PLAIN);
    let answers = Answers { matches: 64, best: 256 + 4 * 32 };
    scan(visit, "scan/conversation/256 prompts", &index, &workload.prompts, answers);

    let workload = Workload::decoded(3, 64, 256);
    let index = filled(&workload, PLAIN);
    scan(visit, "scan/conversation, decoded/256 prompts", &index, &workload.prompts, answers);
    gather(&index, &workload.prompts);
    scan(visit, "scan/conversation, decoded and gathered/256 prompts", &index, &workload.prompts, answers);

    let unknown: Vec<Vec<i64>> = (0..1_000).map(|seed| Seeded::new(1_000 + seed).chain(64)).collect();
    scan(visit, "scan/first unknown/1000 prompts", &index, &unknown, Answers { matches: 0, best: 0 });

    let workload = Workload::even(4, 2_000, 64);
    let index = filled(&workload, SWA);
    for store in workload.stores.iter().filter(|store| store.worker % 2 == 0) {
        report(&index, store.worker, &store.hashes[..1_000], at(Tier::Dram, SWA));
    }
    scan(
        visit,
        "scan/swa, two tiers/2000x64",
        &index,
        &workload.prompts,
        Answers { matches: 64, best: 2_000 },
    );
}

/// How many blocks a worker holds.
fn blocks_of(workload: &Workload, worker: usize) -> usize {
    let stores = workload.stores.iter().filter(|store| store.worker == worker);
    stores.map(|store| store.hashes.len()).sum()
}

/// What every prompt of a scenario is answered with.
#[derive(Clone, Copy)]
struct Answers {
    matches: usize,
    best: usize,
}

fn scan(visit: &mut Visit<'_>, name: &str, index: &Index, prompts: &[Vec<i64>], answers: Answers) {
    let packed: Vec<Vec<u8>> = prompts.iter().map(|prompt| PackedHashes::pack(prompt)).collect();
    let mut scratch = PrefixScratch::default();
    let view = index.read();
    for prompt in &packed {
        prefix(&view, PackedHashes::new(prompt).expect("packed"), &mut scratch);
        assert_eq!(scratch.matches().len(), answers.matches, "{name}: matches");
        let best = scratch.matches().first().map_or(0, |longest| longest.blocks as usize);
        assert_eq!(best, answers.best, "{name}: blocks");
    }
    visit(
        name,
        Box::new(|| {
            for prompt in &packed {
                prefix(&view, PackedHashes::new(prompt).expect("packed"), &mut scratch);
                black_box(scratch.matches());
            }
        }),
    );
}

/// Scans of a prompt, one after each of some changes; these are counted too.
fn scan_between(visit: &mut Visit<'_>, name: &str, index: &Index, prompt: &[i64], changes: &[Prepared]) {
    let packed = PackedHashes::pack(prompt);
    let mut scratch = PrefixScratch::default();
    let mut turn = || {
        for change in changes {
            change.apply(index);
            prefix(&index.read(), PackedHashes::new(&packed).expect("packed"), &mut scratch);
            black_box(scratch.matches());
        }
    };
    turn();
    visit(name, Box::new(turn));
}

fn applies(visit: &mut Visit<'_>) {
    let chain = Seeded::new(5).chain(APPLIED_BLOCKS);
    let leaves: Vec<i64> = chain.iter().rev().copied().collect();
    for stretch in [32, 1] {
        let reports = |worker| each(&chain, stretch, |hashes| Prepared::report(worker, hashes, PLAIN));
        let index = standing();
        apply(visit, &format!("apply/report new/{APPLIED_BLOCKS} by {stretch}"), &index, &reports(0));
        apply(visit, &format!("apply/report second/{APPLIED_BLOCKS} by {stretch}"), &index, &reports(1));
        let revokes = |worker| each(&leaves, stretch, |hashes| Prepared::revoke(worker, hashes, PLAIN));
        apply(visit, &format!("apply/revoke second/{APPLIED_BLOCKS} by {stretch}"), &index, &revokes(1));
        apply(visit, &format!("apply/revoke last/{APPLIED_BLOCKS} by {stretch}"), &index, &revokes(0));
    }

    let index = standing();
    for stretch in Seeded::new(6).chain(STANDING_BLOCKS).chunks(workload::REPORT_HASHES) {
        report(&index, 100, stretch, PLAIN);
    }
    apply(visit, &format!("apply/clear/{STANDING_BLOCKS}"), &index, &[Prepared::clear(100, PLAIN)]);
    visit(&format!("maintain/after clear of {STANDING_BLOCKS}"), Box::new(|| settle(&index)));

    // As many as may wait at once to be gathered.
    let workload = Workload::decoded(7, 8, 64);
    let index = filled(&workload, PLAIN);
    workload.prompts.iter().for_each(|prompt| drop(answer(&index, prompt)));
    visit("maintain/gather 64 x 128 decoded blocks", Box::new(|| settle(&index)));
}

fn each(hashes: &[i64], stretch: usize, prepare: impl Fn(&[i64]) -> Prepared) -> Vec<Prepared> {
    hashes.chunks(stretch).map(prepare).collect()
}

fn apply(visit: &mut Visit<'_>, name: &str, index: &Index, batches: &[Prepared]) {
    visit(
        name,
        Box::new(|| {
            for batch in batches {
                batch.apply(index);
            }
        }),
    );
}

fn filled(workload: &Workload, placement: Placement) -> Index {
    let index = repeatable();
    fill(&index, workload, placement);
    index
}

/// An index whose table does not depend on random keys, so that counts repeat.
fn repeatable() -> Index {
    Index::with_tuning(Tuning { keys: Keys::Fixed, ..Tuning::default() })
}

/// An index in use, so that tables have their usual fill.
fn standing() -> Index {
    let index = repeatable();
    Fleet::new(7, 16, STANDING_BLOCKS, &index);
    index
}

/// Blocks of one session of the memory scenarios.
const SESSION: usize = 512;

/// Blocks of one turn of a session.
const TURN: usize = 32;

/// Workers of the memory scenarios.
const WORKERS: usize = 64;

/// Counts the bytes that `blocks` blocks hold on to, through a life of the index.
fn memory(blocks: usize) {
    let line = |name: &str, quantity: &str, count: f64| println!("memory/{name}\t{quantity}\t{count:.2}");
    let millions = format!("{}M", blocks as f64 / 1e6);
    let start = held();
    let index = repeatable();
    let sessions = |seed: u64, shift: usize| {
        let mut seeded = Seeded::new(seed);
        for session in 0..blocks / SESSION {
            report(&index, (session + shift) % WORKERS, &seeded.chain(SESSION), PLAIN);
        }
    };
    let stored = (blocks / SESSION * SESSION) as f64;

    sessions(8, 0);
    let distinct = held() - start;
    line(&format!("distinct block/{millions}"), "bytes", distinct as f64 / stored);
    sessions(8, 1);
    let whole = held() - start - distinct;
    line(&format!("further placement, whole sessions/{millions}"), "bytes", whole as f64 / stored);
    // Each turn of a session goes to a worker of its own, so that runs are short everywhere.
    let mut seeded = Seeded::new(8);
    for turn in 0..stored as usize / TURN {
        report(&index, turn * 7 % WORKERS, &seeded.chain(TURN), PLAIN);
    }
    let turns = held() - start - distinct - whole;
    line(&format!("further placement, turns apart/{millions}"), "bytes", turns as f64 / stored);

    // Free slots are kept for a while, so a first churn may take some; a long one may not take more.
    let before = held() - start;
    let mut seeded = Seeded::new(9);
    let mut churn = |turns| {
        for turn in 0..turns {
            let stretch = seeded.chain(TURN);
            report(&index, turn % WORKERS, &stretch, PLAIN);
            workload::revoke(&index, turn % WORKERS, &stretch);
        }
        held() - start
    };
    let first = churn(10_000);
    let percent = 100.0 * first as f64 / before as f64;
    line(&format!("first churn/{millions}"), "percent of before", percent);
    let after = churn(100_000);
    let percent = 100.0 * after as f64 / first as f64;
    line(&format!("long churn/{millions}"), "percent of first churn", percent);

    let peak = after.max(first).max(before);
    for worker in 0..WORKERS {
        Prepared::clear(worker, PLAIN).apply(&index);
    }
    settle(&index);
    let left = held() - start;
    line(&format!("cleared/{millions}"), "percent of peak", 100.0 * left as f64 / peak as f64);
    assert!(index.read().sizes().blocks == 0, "blocks left after a clear of everything");
}

/// Bytes taken from the allocator and not given back.
fn held() -> isize {
    let Stats { bytes_allocated, bytes_deallocated, .. } = ALLOCATOR.stats();
    bytes_allocated as isize - bytes_deallocated as isize
}
