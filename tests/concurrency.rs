//! Readers beside a writer: each answer is one that only whole batches can explain.
//!
//! The writer takes every worker through numbered versions. One batch replaces
//! all that a worker has: its chain, its address, its spec and a stamp block of
//! its own that names the version. In between a batch the worker has nothing or
//! a mixture, so a reader that meets half a batch sees a stamp that does not
//! fit the rest. Readers read for as long as the writer has batches left, a fixed
//! number; no outcome depends on who runs when.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use sgl_kv_indexer::arena::{Action, Batch, BatchError, CacheSpec, Index, PackedHashes, ReadView, Tier};
use sgl_kv_indexer::scan::lookup::{hit_counts, match_blocks};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

const WORKERS: usize = 5;
const VERSIONS: usize = 1_000;
/// Stamp blocks of a worker; versions take them in turn.
const STAMPS: usize = 7;
const READERS: usize = 3;
/// Blocks that every version's chain begins with; no answer may ever be shorter.
const SHARED: usize = 96;
/// Blocks of a chain after the shared ones.
const OWN: usize = 160;
/// Different chains; versions take them in turn.
const CHAINS: usize = 3;

/// A chain's blocks: the shared ones, then its own.
fn chain(number: usize) -> Vec<i64> {
    let shared = (0..SHARED).map(|block| block as i64);
    let own = (0..OWN).map(|block| ((number + 1) << 32 | block) as i64);
    shared.chain(own).collect()
}

/// The block whose token count, less one, is the worker's version.
fn stamp(worker: usize, version: usize) -> i64 {
    -1 - (worker * STAMPS + version % STAMPS) as i64
}

fn name(worker: usize) -> String {
    format!("worker-{worker}")
}

fn address(worker: usize, version: usize) -> String {
    format!("http://worker-{worker}/{version}")
}

/// Odd versions have a spec, and masks to fit it; even ones have neither.
fn spec(version: usize) -> Option<CacheSpec> {
    (version % 2 == 1).then_some(CacheSpec {
        version: 1,
        components: CacheSpec::FULL,
        swa_window_tokens: 0,
        full_tier_mask: Tier::Hbm.mask_bit(),
        swa_tier_mask: 0,
        mamba_tier_mask: 0,
    })
}

/// Replaces all that the worker has; a spoilt batch is refused for its last action.
fn write(index: &Index, worker: usize, version: usize, spoilt: bool) -> Result<(), BatchError> {
    let blocks = chain(version % CHAINS);
    let packed = PackedHashes::pack(&blocks);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let stamp = PackedHashes::pack(&[stamp(worker, version)]);
    let stamp = PackedHashes::new(&stamp).expect("a whole hash");
    let masks = vec![u32::from(spec(version).is_some()); blocks.len()];
    let tokens = [version as u32 + 1];
    let tier = Tier::Hbm;
    let actions = [
        Action::ClearTier { tier },
        Action::Report { tier, hashes, masks: &masks, tokens: &[] },
        Action::Report { tier, hashes: stamp, masks: &[], tokens: &tokens },
        Action::Revoke { tier, hashes: hashes.first(0) },
    ];
    index.apply(&Batch {
        worker_id: &name(worker),
        worker_address: &address(worker, version),
        cache_spec: spec(version),
        seq: version as u64,
        actions: if spoilt { &actions } else { &actions[..3] },
    })
}

/// The version of each worker by its stamp, with all the rest of the state held against it.
fn read(
    view: &ReadView,
    stamps: PackedHashes<'_>,
    chains: &[Vec<u8>],
    scratch: &mut PrefixScratch,
) -> Vec<usize> {
    let labels = view.labels();
    let label = |worker| labels.get(worker).expect("a worker that is answered has a label");
    let mut versions = vec![None; WORKERS];
    let found = match_blocks(view, stamps, false);
    for row in &found.workers {
        let [tier] = &row.tiers[..] else { panic!("{row:?}") };
        let [position] = tier.positions[..] else { panic!("two stamps at once: {row:?}") };
        let (worker, version) = (position as usize / STAMPS, found.tokens[position as usize] as usize - 1);
        assert_eq!(position as usize % STAMPS, version % STAMPS);
        assert_eq!(label(row.worker).id(), name(worker));
        assert_eq!(label(row.worker).address(), address(worker, version));
        assert_eq!(versions[worker].replace(version), None);
    }
    let versions: Vec<usize> =
        versions.into_iter().map(|version| version.expect("every worker has a stamp")).collect();

    for (number, packed) in chains.iter().enumerate() {
        let hashes = PackedHashes::new(packed).expect("whole hashes");
        prefix(view, hashes, scratch);
        let mut blocks = vec![0; WORKERS];
        for row in scratch.matches() {
            let worker = (0..WORKERS).find(|worker| label(row.worker).id() == name(*worker));
            blocks[worker.expect("a worker of ours")] = row.blocks as usize;
        }
        let expected: Vec<usize> = versions
            .iter()
            .map(|version| if version % CHAINS == number { SHARED + OWN } else { SHARED })
            .collect();
        assert_eq!(blocks, expected, "chain {number} at versions {versions:?}");
    }
    versions
}

/// The writer goes round by round, so the first few workers are one version ahead of the others.
fn assert_in_order(versions: &[usize]) {
    assert!(versions.is_sorted_by(|earlier, later| earlier >= later), "{versions:?}");
    assert!(versions[0] - versions[WORKERS - 1] <= 1, "{versions:?}");
}

/// Lets readers end even where the writer fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn every_answer_is_of_whole_batches() {
    let index = Index::new();
    for worker in 0..WORKERS {
        write(&index, worker, 0, false).expect("legal");
    }
    let stamps: Vec<i64> =
        (0..WORKERS).flat_map(|worker| (0..STAMPS).map(move |version| stamp(worker, version))).collect();
    let stamps = PackedHashes::pack(&stamps);
    let chains: Vec<Vec<u8>> = (0..CHAINS).map(|number| PackedHashes::pack(&chain(number))).collect();
    let start = Barrier::new(READERS + 2);
    let written = AtomicBool::new(false);

    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let stamps = PackedHashes::new(&stamps).expect("whole hashes");
                let mut scratch = PrefixScratch::default();
                let mut before = vec![0; WORKERS];
                start.wait();
                while !written.load(Ordering::Acquire) {
                    let versions = read(&index.read(), stamps, &chains, &mut scratch);
                    assert_in_order(&versions);
                    let forward = versions.iter().zip(&before).all(|(now, before)| now >= before);
                    assert!(forward, "time runs backwards: {before:?} then {versions:?}");
                    before = versions;
                }
            });
        }
        scope.spawn(|| {
            start.wait();
            for _ in 0..WORKERS * VERSIONS {
                index.maintain();
            }
        });
        scope.spawn(|| {
            let _written = SetOnDrop(&written);
            start.wait();
            for version in 1..VERSIONS {
                for worker in 0..WORKERS {
                    let spoilt = write(&index, worker, version + 1, true);
                    assert_eq!(spoilt, Err(BatchError::NoHashes { action: 3 }));
                    write(&index, worker, version, false).expect("legal");
                }
            }
        });
    });

    let stamps = PackedHashes::new(&stamps).expect("whole hashes");
    let last = read(&index.read(), stamps, &chains, &mut PrefixScratch::default());
    assert_eq!(last, [VERSIONS - 1; WORKERS]);
    index.audit().expect("sound");
}

/// Counting look-ups run beside each other under the read lock; none may be lost.
#[test]
fn no_hit_is_lost_between_readers() {
    const COUNTS: u64 = 2_000;
    let index = Index::new();
    write(&index, 0, 0, false).expect("legal");
    let packed = PackedHashes::pack(&chain(0)[..8]);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let start = Barrier::new(READERS);
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                start.wait();
                for _ in 0..COUNTS {
                    match_blocks(&index.read(), hashes, true);
                }
            });
        }
    });
    let counts = hit_counts(&index.read(), hashes);
    let expected: Vec<(u32, u64)> = (0..8).map(|position| (position, READERS as u64 * COUNTS)).collect();
    assert_eq!(counts, expected);
}
