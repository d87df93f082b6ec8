//! The longest that one action keeps others waiting.
//!
//! Applies are short on average whatever they do; this looks for the longest
//! one. For each it prints the longest time on the clock and the longest that
//! the thread itself ran, which other processes on the machine do not lengthen.
//! An argument sets how many blocks the table grows to.

mod workload;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use sgl_kv_indexer::arena::{Index, PackedHashes};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use workload::{PLAIN, Prepared, REPORT_HASHES, Seeded, report, settle};

/// The binaries' allocator: it backs the index with huge pages where the system lets it, the system's own does not.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Blocks that the table grows to unless an argument says otherwise.
const BLOCKS: usize = 4_000_000;

/// Blocks of the worker that is cleared.
const CLEARED_BLOCKS: usize = 1_000_000;

fn main() {
    let blocks = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(BLOCKS);
    println!("single applies of {REPORT_HASHES} hashes, longest in ms: clock, thread");
    grow(blocks);
    shapes();
    clear();
}

/// The longest of many.
#[derive(Debug, Default)]
struct Longest {
    clock: Duration,
    thread: Duration,
}

impl Longest {
    fn time(&mut self, work: impl FnOnce()) {
        let (clock, thread) = (Instant::now(), ThreadTime::now());
        work();
        self.thread = self.thread.max(thread.elapsed());
        self.clock = self.clock.max(clock.elapsed());
    }

    fn print(&self, what: &str) {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        println!("{what}\t{:.3}\t{:.3}", milliseconds(self.clock), milliseconds(self.thread));
    }
}

/// Stores new blocks until there are `blocks`, and tells the longest apply of each doubling.
fn grow(blocks: usize) {
    let index = Index::new();
    let mut seeded = Seeded::new(1);
    let mut longest = Longest::default();
    let mut stored = 0;
    let mut next = 65_536;
    while stored < blocks {
        let batch = Prepared::report(stored / REPORT_HASHES % 64, &seeded.chain(REPORT_HASHES), PLAIN);
        longest.time(|| batch.apply(&index));
        stored += REPORT_HASHES;
        if stored >= next.min(blocks) {
            assert_eq!(index.read().sizes().blocks, stored, "all are stored");
            longest.print(&format!("new blocks, table of {stored}"));
            longest = Longest::default();
            next *= 2;
        }
    }
    scattered(&index, stored);
}

/// Reports and revokes of blocks all over a large table, where every look-up misses the caches.
fn scattered(index: &Index, stored: usize) {
    let mut seeded = Seeded::new(1);
    let mut hashes = seeded.chain(stored);
    seeded.shuffle(&mut hashes);
    let (mut reports, mut revokes) = (Longest::default(), Longest::default());
    for batch in hashes.chunks_exact(REPORT_HASHES).take(20) {
        let prepared = Prepared::report(100, batch, PLAIN);
        reports.time(|| prepared.apply(index));
    }
    for batch in hashes.chunks_exact(REPORT_HASHES).take(20) {
        let prepared = Prepared::revoke(100, batch, PLAIN);
        revokes.time(|| prepared.apply(index));
    }
    reports.print(&format!("another holder of scattered blocks, table of {stored}"));
    revokes.print(&format!("its revoke, table of {stored}"));
}

/// A chain that 256 workers hold, changed by one of them.
fn shapes() {
    let index = Index::new();
    let chain = Seeded::new(2).chain(REPORT_HASHES);
    let mut longest = Longest::default();
    for worker in 0..256 {
        let batch = Prepared::report(worker, &chain, PLAIN);
        longest.time(|| batch.apply(&index));
    }
    longest.print("the same blocks for each of 256 workers");

    let every_other: Vec<i64> = chain.iter().step_by(2).copied().collect();
    let mut longest = Longest::default();
    for worker in 0..64 {
        let batch = Prepared::revoke(worker, &every_other, PLAIN);
        longest.time(|| batch.apply(&index));
    }
    longest.print("revoke of every other of them");

    let mut seeded = Seeded::new(3);
    let mut longest = Longest::default();
    for worker in 0..64 {
        let kept: Vec<i64> = chain.iter().copied().filter(|_| seeded.below(2) == 0).collect();
        let batch = Prepared::revoke(64 + worker, &kept, PLAIN);
        longest.time(|| batch.apply(&index));
    }
    longest.print("revoke of a random half of them");

    let mut longest = Longest::default();
    let batch = Prepared::report(0, &chain, PLAIN);
    longest.time(|| batch.apply(&index));
    longest.print("report of all of them, where all sets differ");
}

/// Clears a worker of a million blocks while a reader asks all the time.
fn clear() {
    let index = Index::new();
    let mut seeded = Seeded::new(4);
    let asked = seeded.chain(64);
    report(&index, 1, &asked, PLAIN);
    for _ in 0..CLEARED_BLOCKS / 512 {
        report(&index, 0, &seeded.chain(512), PLAIN);
    }
    println!("clear of a worker with {CLEARED_BLOCKS} blocks, longest in ms: clock, thread");
    let mut quiet = Longest::default();
    let mut asking = Asking::new(&asked);
    for _ in 0..10_000 {
        quiet.time(|| asking.ask(&index));
    }
    quiet.print("a reader before");

    let done = AtomicBool::new(false);
    let (mut apply, mut steps) = (Longest::default(), Longest::default());
    let reader = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut longest = Longest::default();
            let mut asking = Asking::new(&asked);
            // A stale `false` costs one more question.
            while !done.load(Ordering::Relaxed) {
                longest.time(|| asking.ask(&index));
            }
            longest
        });
        apply.time(|| Prepared::clear(0, PLAIN).apply(&index));
        let mut more = true;
        while more {
            steps.time(|| more = index.maintain());
        }
        done.store(true, Ordering::Relaxed);
        reader.join().expect("the reader")
    });
    apply.print("the clear itself");
    steps.print("a step of the clean-up after it");
    reader.print("a reader meanwhile");
    settle(&index);
    assert_eq!(index.read().sizes().blocks, asked.len(), "only the reader's blocks are left");
}

/// A question with all that it needs made ready.
struct Asking {
    packed: Vec<u8>,
    scratch: PrefixScratch,
}

impl Asking {
    fn new(prompt: &[i64]) -> Self {
        Asking { packed: PackedHashes::pack(prompt), scratch: PrefixScratch::default() }
    }

    fn ask(&mut self, index: &Index) {
        let view = index.read();
        let read = prefix(&view, PackedHashes::new(&self.packed).expect("packed"), &mut self.scratch);
        assert_eq!(read as usize, self.packed.len() / 8, "the reader's blocks are all held");
    }
}
