//! Chunks of slots: refilled while there is room in them, given back once nobody holds anything there.
//!
//! Giving chunks back takes many steps when they are large, and reports go on in
//! between: they bring remembered blocks back, or store others.

use sgl_kv_indexer::arena::{Action, Batch, Index, PackedHashes, Tier, Tuning};

use crate::ops::Pool;

/// Small enough for many chunks, large enough that blocks by the chunk are more than a step looks at.
const CHUNK_SLOTS: u32 = 1_024;
const CHUNKS: u32 = 48;

/// Applies one action to a worker's blocks of a range.
fn apply(
    index: &Index,
    worker: u32,
    blocks: std::ops::Range<u32>,
    action: fn(PackedHashes<'_>) -> Action<'_>,
) {
    let packed = PackedHashes::pack(&blocks.map(|block| Pool::Random.hash(block)).collect::<Vec<_>>());
    apply_packed(index, worker, action(PackedHashes::new(&packed).expect("whole hashes")));
}

fn apply_packed(index: &Index, worker: u32, action: Action<'_>) {
    let batch = Batch {
        worker_id: &format!("worker-{worker}"),
        worker_address: "http://worker",
        cache_spec: None,
        seq: 0,
        actions: &[action],
    };
    index.apply(&batch).expect("a legal batch");
}

fn report(hashes: PackedHashes<'_>) -> Action<'_> {
    Action::Report { tier: Tier::Hbm, hashes, masks: &[], tokens: &[] }
}

fn revoke(hashes: PackedHashes<'_>) -> Action<'_> {
    Action::Revoke { tier: Tier::Hbm, hashes }
}

fn clear(_: PackedHashes<'_>) -> Action<'_> {
    Action::ClearTier { tier: Tier::Hbm }
}

#[test]
fn blocks_that_come_and_go_stay_in_the_chunk_that_has_room_for_them() {
    let index = Index::new();
    apply(&index, 0, 0..16_000, report);
    let before = index.read().sizes();
    for first in (16_000..216_000).step_by(100) {
        apply(&index, 0, first..first + 100, report);
        apply(&index, 0, first..first + 100, revoke);
    }
    let after = index.read().sizes();
    assert_eq!(after.blocks, before.blocks);
    assert_eq!(after.block_bytes, before.block_bytes, "no chunk is opened beside one that is mostly free");
    assert!(after.ghosts < 65_536, "{} blocks are remembered in one chunk", after.ghosts);
    index.audit().expect("sound tables");
}

#[test]
fn a_long_report_of_what_was_held_apart_is_stored_side_by_side() {
    const GAPS: u32 = 32;
    let index = Index::with_tuning(Tuning { chunk_slots: 64, ..Tuning::default() });
    // A chunk of one stretch and twenty of blocks that came alone, of which the first loses every other.
    apply(&index, 0, 0..64, report);
    (64..21 * 64).for_each(|block| apply(&index, 0, block..block + 1, report));
    let gaps = (0..GAPS).map(|gap| 64 + 2 * gap + 1);
    gaps.clone().for_each(|block| apply(&index, 0, block..block + 1, revoke));
    let before = index.read().sizes();
    // Another worker has all of them in one report, as a chain.
    let hashes: Vec<i64> = gaps.map(|block| Pool::Random.hash(block)).collect();
    let packed = PackedHashes::pack(&hashes);
    apply_packed(&index, 1, report(PackedHashes::new(&packed).expect("whole hashes")));
    let after = index.read().sizes();
    assert_eq!(after.blocks, before.blocks + GAPS as usize);
    // The last of them has no other behind it, so that it comes back to its gap.
    assert!(after.runs <= before.runs + 2, "{} runs became {}", before.runs, after.runs);
    index.audit().expect("sound tables");
}

/// Chunks of a worker that held all or every other of them are given back while others report, by a table whose
/// segments are whole, split, or some of them split.
#[test]
fn chunks_are_given_back_step_by_step_while_reports_go_on() {
    let usual = Tuning { chunk_slots: CHUNK_SLOTS as usize, ..Tuning::default() };
    let split = Tuning { segment_bits: 4, segment_ids: 1_000, ..usual };
    let partly = Tuning { segment_bits: 4, segment_ids: 6_000, ..usual };
    for (apart, tuning) in [(false, usual), (true, usual), (false, split), (true, split), (true, partly)] {
        let index = Index::with_tuning(tuning);
        let stays = |chunk: u32| chunk == CHUNKS - 1 || apart && chunk.is_multiple_of(2);
        for chunk in 0..CHUNKS {
            let blocks = chunk * CHUNK_SLOTS..(chunk + 1) * CHUNK_SLOTS;
            apply(&index, u32::from(stays(chunk)), blocks, report);
        }
        let full = index.read().sizes();
        apply(&index, 0, 0..0, clear);

        let mut back = 0;
        for step in 0u32.. {
            assert!(step < 10_000, "maintenance has an end");
            let ghosts = index.read().sizes().ghosts;
            let more = index.maintain();
            let forgotten = ghosts.saturating_sub(index.read().sizes().ghosts) as u32;
            assert!(forgotten <= 2 * 16_384, "one step forgets {forgotten} blocks");
            index.audit().unwrap_or_else(|fault| panic!("apart: {apart}, step {step}: {fault}"));
            // Once some are forgotten, a few of the others come back.
            if forgotten > 0 && back < 5 {
                back += 1;
                let first = (back * 9 % (CHUNKS - 1) / 2 * 2 + 1) * CHUNK_SLOTS;
                apply(&index, 2, first..first + 20, report);
            }
            if !more {
                break;
            }
        }
        assert!(back > 1, "several steps forget blocks");
        let left = index.read().sizes();
        let kept = (0..CHUNKS).filter(|chunk| stays(*chunk)).count() * CHUNK_SLOTS as usize;
        assert_eq!(left.blocks, kept + back as usize * 20);
        assert!(left.ghosts < full.blocks - kept, "ghosts go with their chunks");
        assert!(left.block_bytes < full.block_bytes, "chunks are given back");
    }
}

/// A sweep is given up where all of its chunks are in use again before it comes to its end.
#[test]
fn a_sweep_whose_chunks_are_taken_into_use_again_is_over() {
    let index = Index::with_tuning(Tuning { chunk_slots: CHUNK_SLOTS as usize, ..Tuning::default() });
    let blocks_of = |chunk: u32| chunk * CHUNK_SLOTS..(chunk + 1) * CHUNK_SLOTS;
    for chunk in 0..CHUNKS {
        apply(&index, u32::from(chunk % 2 == 1), blocks_of(chunk), report);
    }
    apply(&index, 0, 0..0, clear);
    let all = (CHUNKS / 2 * CHUNK_SLOTS) as usize;
    let ghosts = || index.read().sizes().ghosts;
    while ghosts() < all {
        assert!(index.maintain(), "{} of {all} blocks are remembered", ghosts());
    }
    while ghosts() == all {
        assert!(index.maintain(), "the sweep forgets some");
    }
    assert!(ghosts() > 0, "and leaves some for its next step");
    (0..CHUNKS).step_by(2).for_each(|chunk| apply(&index, 0, blocks_of(chunk), report));
    while index.maintain() {
        index.audit().expect("sound tables");
    }
    index.audit().expect("sound tables");
    assert_eq!(index.read().sizes().blocks, (CHUNKS * CHUNK_SLOTS) as usize);
}
