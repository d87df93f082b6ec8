//! Published indexes beside ours: the same changes, the same prompts, one machine, one run.
//!
//! Each line is a workload and what it costs each index, and then how many times
//! the cost of ours the best published index is: below 1 we lose. Answers are
//! compared with the oracle on a small copy of the workload and with the plain
//! index on the whole; an index with wrong answers gets a `!` and is not the best.

mod dynamo;
mod peer;
#[path = "../../../benches/workload/mod.rs"]
mod workload;

use std::hint::black_box;
use std::time::{Duration, Instant};

use cap::Cap;
use mimalloc::MiMalloc;
use sgl_kv_indexer::arena::{Action, Batch, PackedHashes, Tier};
use sgl_kv_indexer::scan::naive::NaiveIndex;

use peer::{Ours, Peer, Plain, Rows, Smg, Step, sorted};
use workload::{Seeded, Workload, worker_address, worker_name};

/// The allocator of our binaries, for all of them.
#[global_allocator]
static ALLOCATOR: Cap<MiMalloc> = Cap::new(MiMalloc, usize::MAX);

/// Rounds of a measurement; their median counts.
const ROUNDS: usize = 5;

/// Prompts asked between two rests.
const ASKED_BEFORE_REST: usize = 32;

/// How long one index is asked in one round.
const ROUND: Duration = Duration::from_millis(30);

/// Blocks of the apply and memory workloads.
const BLOCKS: usize = 102_400;

/// Blocks of one of their sessions.
const SESSION: usize = 512;

/// Every index: the plain one, ours, the published ones.
const PEERS: [fn() -> Box<dyn Peer>; 6] = [
    || Box::new(Plain::default()),
    || Box::new(Ours::default()),
    || Box::new(Smg::default()),
    || Box::new(dynamo::Tree::default()),
    || Box::new(dynamo::compressed()),
    || Box::new(dynamo::positional()),
];

/// Place of ours among them.
const OURS: usize = 1;

fn main() {
    let picked: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |name: &str| picked.is_empty() || picked.iter().any(|word| name.contains(word.as_str()));
    let names: Vec<&str> = PEERS.iter().map(|make| make().name()).collect();
    println!("workload\tunit\t{}\tbest peer / ours", names.join("\t"));
    for scan in scans() {
        if wanted(&scan.name) {
            scan.run();
        }
    }
    for (name, before, steps) in applies() {
        if wanted(&name) {
            apply(&name, &before, &steps);
        }
    }
    for (name, before, steps) in memories() {
        if wanted(&name) {
            memory(&name, &before, &steps);
        }
    }
}

/// Changes, and prompts to be asked after them.
struct Scan {
    name: String,
    steps: Vec<Step>,
    prompts: Vec<Vec<i64>>,
    /// A smaller one of the same kind, for the oracle.
    small: (Vec<Step>, Vec<Vec<i64>>),
    /// Whether indexes rest once in a while before they are timed, while every prompt is asked once.
    rests: bool,
}

impl Scan {
    fn new(name: String, make: impl Fn(usize) -> Workload, change: fn(&Workload) -> Vec<Step>) -> Scan {
        let (whole, small) = (make(1), make(32));
        let small_steps = [stores(&small), change(&small)].concat();
        Scan {
            name: format!("scan/{name}"),
            steps: [stores(&whole), change(&whole)].concat(),
            prompts: whole.prompts,
            small: (small_steps, small.prompts),
            rests: false,
        }
    }

    fn run(&self) {
        let mut peers: Vec<Box<dyn Peer>> = PEERS.iter().map(|make| make()).collect();
        let (steps, prompts) = &self.small;
        let oracle = oracle(steps, prompts);
        let mut wrong: Vec<usize> =
            peers.iter_mut().map(|peer| wrong(&mut **peer, steps, prompts, &oracle)).collect();
        peers = PEERS.iter().map(|make| make()).collect();
        let mut expected = Vec::new();
        for (place, peer) in peers.iter_mut().enumerate() {
            if place == 0 {
                wrong[0] += self::wrong(&mut **peer, &self.steps, &self.prompts, &[]);
                expected = (0..self.prompts.len()).map(|prompt| peer.rows(prompt)).collect();
            } else {
                wrong[place] += self::wrong(&mut **peer, &self.steps, &self.prompts, &expected);
            }
        }
        if self.rests {
            for peer in &mut peers {
                for prompt in 0..self.prompts.len() {
                    black_box(peer.ask(prompt));
                    if prompt % ASKED_BEFORE_REST == 0 {
                        peer.rest();
                    }
                }
                peer.rest();
            }
        }
        let mut rounds = vec![Vec::new(); peers.len()];
        for _ in 0..ROUNDS {
            for (peer, rounds) in peers.iter_mut().zip(&mut rounds) {
                rounds.push(time(&mut **peer, self.prompts.len()));
            }
        }
        print(&self.name, "ns", rounds.into_iter().map(median), &wrong);
    }
}

/// Fills an index and counts the answers that are not the expected ones.
fn wrong(peer: &mut dyn Peer, steps: &[Step], prompts: &[Vec<i64>], expected: &[Rows]) -> usize {
    peer.load(steps);
    peer.apply();
    peer.take(prompts);
    expected.iter().enumerate().filter(|(prompt, rows)| peer.rows(*prompt) != **rows).count()
}

fn oracle(steps: &[Step], prompts: &[Vec<i64>]) -> Vec<Rows> {
    let mut oracle = NaiveIndex::default();
    for step in steps {
        let (worker, hashes) = match step {
            Step::Store { worker, hashes, .. } | Step::Remove { worker, hashes } => (*worker, &hashes[..]),
            Step::Clear { worker } => (*worker, &[][..]),
        };
        let packed = PackedHashes::pack(hashes);
        let hashes = PackedHashes::new(&packed).expect("packed");
        let tier = Tier::Hbm;
        let action = match step {
            Step::Store { .. } => Action::Report { tier, hashes, masks: &[], tokens: &[] },
            Step::Remove { .. } => Action::Revoke { tier, hashes },
            Step::Clear { .. } => Action::ClearTier { tier },
        };
        let batch = Batch {
            worker_id: &worker_name(worker),
            worker_address: &worker_address(worker),
            cache_spec: None,
            seq: 0,
            actions: &[action],
        };
        oracle.apply(&batch).expect("a good batch");
    }
    let number = |name: &str| name.rsplit('-').next().and_then(|digits| digits.parse().ok());
    let row = |(name, _, blocks): (String, String, u32)| (number(&name).expect("a number"), blocks);
    prompts.iter().map(|prompt| sorted(oracle.prefix(prompt).into_iter().map(row).collect())).collect()
}

/// Nanoseconds of one question, of many in turn: the clock is looked at so seldom that it costs nothing.
fn time(peer: &mut dyn Peer, prompts: usize) -> f64 {
    let (mut asked, mut turns) = (0, 1);
    let start = Instant::now();
    loop {
        for prompt in (0..turns).flat_map(|_| 0..prompts) {
            black_box(peer.ask(prompt));
        }
        asked += turns * prompts;
        let elapsed = start.elapsed();
        if elapsed >= ROUND {
            return elapsed.as_nanos() as f64 / asked as f64;
        }
        if elapsed < ROUND / 8 {
            turns *= 2;
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Applies `steps` after `before`, and prints millions of blocks a second.
fn apply(name: &str, before: &[Step], steps: &[Step]) {
    let blocks: usize = steps
        .iter()
        .map(|step| match step {
            Step::Store { hashes, .. } | Step::Remove { hashes, .. } => hashes.len(),
            Step::Clear { .. } => BLOCKS,
        })
        .sum();
    let costs = PEERS.map(|make| {
        let rounds = (0..3).map(|_| {
            let mut peer = make();
            peer.load(before);
            peer.apply();
            peer.load(steps);
            let start = Instant::now();
            peer.apply();
            start.elapsed().as_nanos() as f64 / blocks as f64
        });
        median(rounds.collect())
    });
    print(name, "ns per block", costs.into_iter(), &[0; PEERS.len()]);
}

/// Applies `steps` after `before`, and prints the bytes that they add.
fn memory(name: &str, before: &[Step], steps: &[Step]) {
    let held = || ALLOCATOR.allocated() as f64;
    let blocks: usize =
        steps.iter().map(|step| if let Step::Store { hashes, .. } = step { hashes.len() } else { 0 }).sum();
    let costs = PEERS.map(|make| {
        let mut peer = make();
        peer.load(before);
        peer.apply();
        peer.forget();
        let start = held();
        peer.load(steps);
        peer.apply();
        peer.forget();
        (held() - start) / blocks as f64
    });
    print(name, "bytes per placement", costs.into_iter(), &[0; PEERS.len()]);
}

fn print(name: &str, unit: &str, costs: impl Iterator<Item = f64>, wrong: &[usize]) {
    let costs: Vec<f64> = costs.collect();
    let best = (OURS + 1..costs.len()).filter(|place| wrong[*place] == 0);
    let best = best.map(|place| costs[place]).fold(f64::INFINITY, f64::min);
    let cells: Vec<String> = costs
        .iter()
        .zip(wrong)
        .map(|(cost, wrong)| match wrong {
            0 => format!("{cost:.1}"),
            count => format!("{cost:.1} ! {count} wrong"),
        })
        .collect();
    println!("{name}\t{unit}\t{}\t{:.2}", cells.join("\t"), best / costs[OURS]);
}

fn scans() -> Vec<Scan> {
    let mut scans = Vec::new();
    let nothing = |_: &Workload| Vec::new();
    for (blocks, holders) in
        [(64, 1), (64, 8), (64, 256), (2_000, 8), (2_000, 256), (100_000, 1), (100_000, 8)]
    {
        // The oracle's time grows with the square of a prompt.
        let make = move |small: usize| match small {
            1 => Workload::even(1, blocks, holders),
            _ => Workload::even(1, (blocks / small).clamp(2, 100), (holders / small).max(1)),
        };
        scans.push(Scan::new(format!("{blocks} blocks, {holders} holders"), make, nothing));
    }
    for sharers in [1, 8, 64] {
        let make = move |small| Workload::conversations(2, sharers, 320 / small);
        scans.push(Scan::new(format!("conversation, {sharers} sharers"), make, nothing));
    }
    for sessions in [320, 8_000] {
        let make = move |small| Workload::decoded(2, 8, 320 / small * sessions / 320);
        let name = format!("conversation, {sessions} sessions decoded in turn");
        scans.push(Scan::new(name.clone(), make, nothing));
        scans.push(Scan { rests: true, ..Scan::new(format!("{name}, asked before"), make, nothing) });
    }
    let ragged = |small| Workload::ragged(3, 2_000 / small, 256 / small);
    scans.push(Scan::new("ragged, 256 holders of 2000 blocks".to_owned(), ragged, nothing));
    scans.push(Scan::new("ragged, after branches came and went".to_owned(), ragged, branches));
    let unknown = |small| {
        let mut workload = Workload::even(4, 100_000 / small, 1);
        workload.prompts = (0..100).map(|seed| Seeded::new(seed << 32).chain(64)).collect();
        workload
    };
    scans.push(Scan::new("first block unknown".to_owned(), unknown, nothing));
    let holes = |workload: &Workload| {
        // An engine that evicts in the middle, where an index that trusts prefixes goes wrong.
        let store = &workload.stores[0];
        let hole = store.hashes.len() / 2;
        vec![Step::Remove { worker: store.worker, hashes: store.hashes[hole..=hole].to_vec() }]
    };
    let even = |small| Workload::even(5, 2_000 / small, 8);
    scans.push(Scan::new("2000 blocks, 8 holders, one with a hole".to_owned(), even, holes));
    scans
}

fn stores(workload: &Workload) -> Vec<Step> {
    let step = |store: &workload::Store| Step::Store {
        worker: store.worker,
        parent: store.parent,
        hashes: store.hashes.clone(),
    };
    workload.stores.iter().map(step).collect()
}

/// Branches off every worker's end, and their removal, tail first.
fn branches(workload: &Workload) -> Vec<Step> {
    let mut seeded = Seeded::new(6);
    let mut steps = Vec::new();
    for _ in 0..2 {
        for store in &workload.stores {
            let (worker, parent) = (store.worker, store.hashes.last().copied());
            let mut hashes = seeded.chain(32);
            steps.push(Step::Store { worker, parent, hashes: hashes.clone() });
            hashes.reverse();
            steps.push(Step::Remove { worker, hashes });
        }
    }
    steps
}

/// Sessions of 512 blocks on worker `first` and the ones after it, stored by `stretch`.
fn sessions(seed: u64, first: usize, stretch: usize) -> Vec<Step> {
    let mut seeded = Seeded::new(seed);
    let mut steps = Vec::new();
    for session in 0..BLOCKS / SESSION {
        let chain = seeded.chain(SESSION);
        let mut parent = None;
        for hashes in chain.chunks(stretch) {
            steps.push(Step::Store { worker: first + session % 16, parent, hashes: hashes.to_vec() });
            parent = hashes.last().copied();
        }
    }
    steps
}

/// Takes back what `steps` store, tail first, by `stretch`.
fn evictions(steps: &[Step], stretch: usize) -> Vec<Step> {
    let mut evictions = Vec::new();
    for step in steps.iter().rev() {
        let Step::Store { worker, hashes, .. } = step else { continue };
        let backwards: Vec<i64> = hashes.iter().rev().copied().collect();
        let remove = |hashes: &[i64]| Step::Remove { worker: *worker, hashes: hashes.to_vec() };
        evictions.extend(backwards.chunks(stretch).map(remove));
    }
    evictions
}

/// Name, what is there before, what is timed.
fn applies() -> Vec<(String, Vec<Step>, Vec<Step>)> {
    let named = |name: &str, before, steps| (format!("apply/{name}"), before, steps);
    let (standing, new) = (sessions(7, 0, 32), sessions(8, 0, 32));
    let one_worker: Vec<Step> = new
        .iter()
        .cloned()
        .map(|step| match step {
            Step::Store { parent, hashes, .. } => Step::Store { worker: 100, parent, hashes },
            other => other,
        })
        .collect();
    vec![
        named("report by 32, new", standing.clone(), new.clone()),
        named("report by 32, second holder", standing.clone(), sessions(7, 16, 32)),
        named("report one by one, new", standing.clone(), sessions(8, 0, 1)),
        named("report one by one, second holder", standing.clone(), sessions(7, 16, 1)),
        named("revoke by 32, tail first", [standing.clone(), new.clone()].concat(), evictions(&new, 32)),
        named("revoke one by one, tail first", [standing.clone(), new.clone()].concat(), evictions(&new, 1)),
        named("clear", [standing, one_worker].concat(), vec![Step::Clear { worker: 100 }]),
    ]
}

fn memories() -> Vec<(String, Vec<Step>, Vec<Step>)> {
    vec![
        ("memory/new blocks".to_owned(), Vec::new(), sessions(9, 0, 512)),
        ("memory/second holder".to_owned(), sessions(9, 0, 512), sessions(9, 1, 512)),
    ]
}
