//! Sessions that are decoded side by side: each chain is stored in pieces, mostly of one block, in turn with
//! the other sessions' pieces, so that its blocks lie apart in every way; some are evicted, some masked.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use sgl_kv_indexer::arena::{CacheSpec, Keys, Tier, Tuning};

use crate::histories::cases;
use crate::ops::{OwnedAction, OwnedBatch, Pool};
use crate::pair::{Checked, Pair};
use crate::ragged::Fleet;

const SESSIONS: u32 = 3;

const WORKERS: u32 = 8;

/// Blocks of a session: more than are looked up together, several times.
const BLOCKS: u32 = 150;

/// As usual; in chunks of a few blocks; with one segment, whose buckets are full at times; with one bucket and tag for all.
const TUNINGS: [fn() -> Tuning; 4] = [
    Tuning::default,
    || Tuning { chunk_slots: 20, ..Tuning::default() },
    || Tuning { segment_bits: 0, ..Tuning::default() },
    || Tuning { keys: Keys::Colliding, ..Tuning::default() },
];

/// One piece of a session, stored or evicted.
#[derive(Debug, Clone, Copy)]
struct Piece {
    session: u32,
    worker: u32,
    blocks: u32,
}

fn piece() -> impl Strategy<Value = Piece> {
    // As many as make a lane, and one less; several in one report may be of sessions in turn.
    let blocks = prop_oneof![12 => Just(1), 2 => 2u32..7, 2 => 7u32..11, 1 => 11u32..70];
    (0..SESSIONS, 0..WORKERS, blocks).prop_map(|(session, worker, blocks)| Piece { session, worker, blocks })
}

fn block_of(session: u32, place: u32) -> u32 {
    session * BLOCKS + place
}

fn hash_of(block: u32) -> i64 {
    Pool::Random.hash(block)
}

fn apply(pair: &mut Pair, fleet: Fleet, worker: u32, action: OwnedAction) -> Checked {
    pair.apply(&OwnedBatch {
        worker_id: format!("worker-{worker}"),
        address: "http://worker:30000".to_owned(),
        spec: fleet.spec(worker),
        actions: vec![action],
    })
}

/// The mask of a worker's block. Some workers lack SWA over a few blocks, so that windows begin within the prompt; the
/// last has components at some blocks whatever its spec says, so without one it fails closed, if a prompt has such a
/// block, be it past the end of its prefix.
fn mask(fleet: Fleet, worker: u32, block: u32) -> u32 {
    let mask = fleet.mask(worker, block);
    match worker {
        _ if worker == WORKERS - 1 && block % 29 == 28 => CacheSpec::FULL,
        _ if worker % 2 == 1 && block % 11 < 6 => mask & !CacheSpec::SWA,
        _ => mask,
    }
}

fn report(pair: &mut Pair, fleet: Fleet, worker: u32, blocks: &[u32]) -> Checked {
    let action = OwnedAction::Report {
        tier: Tier::Hbm,
        hashes: blocks.iter().copied().map(hash_of).collect(),
        masks: blocks.iter().map(|block| mask(fleet, worker, *block)).collect(),
        tokens: blocks.iter().map(|block| 1 + block % 23).collect(),
    };
    apply(pair, fleet, worker, action)
}

/// Asks for each session from several of its blocks on, and with unknown blocks after it and in it.
fn check(pair: &mut Pair) -> Checked {
    for session in 0..SESSIONS {
        let chain: Vec<i64> = (0..BLOCKS).map(|place| hash_of(block_of(session, place))).collect();
        let unknown = |count| (0..count).map(|place| hash_of(block_of(SESSIONS, place)));
        for from in [0, 1, 40] {
            let prompt: Vec<i64> = chain[from..].iter().copied().chain(unknown(40)).collect();
            pair.check_prefix(&prompt, 0)?;
            pair.check_blocks(&prompt)?;
        }
        let (before, after) = chain.split_at(70);
        let gap: Vec<i64> = before.iter().copied().chain(unknown(3)).chain(after.iter().copied()).collect();
        pair.check_prefix(&gap, 0)?;
        pair.check_blocks(&gap)?;
    }
    pair.audit()
}

fn run(fleet: Fleet, tuning: Tuning, stored: &[Piece], evicted: &[Piece]) -> Checked {
    let mut pair = Pair::new(tuning);
    let mut ends = [0; SESSIONS as usize];
    let mut pieces = stored.iter().cycle();
    while let Some(piece) = pieces.next().filter(|_| ends.iter().any(|end| *end < BLOCKS)) {
        let end = &mut ends[piece.session as usize];
        let from = *end;
        *end = BLOCKS.min(from + piece.blocks);
        let blocks: Vec<u32> = (from..*end).map(|place| block_of(piece.session, place)).collect();
        if !blocks.is_empty() {
            // Two workers have each session, one of them from its head on.
            report(&mut pair, fleet, piece.session, &blocks)?;
            report(&mut pair, fleet, piece.worker, &blocks)?;
        }
    }
    check(&mut pair)?;
    // A round of all sessions' next blocks in one report, as of an engine's step.
    let round: Vec<u32> =
        (0..BLOCKS).flat_map(|place| (0..SESSIONS).map(move |session| block_of(session, place))).collect();
    report(&mut pair, fleet, WORKERS, &round)?;
    check(&mut pair)?;
    // Of the last worker all but a session's heads: it is watched over all that follows.
    for session in 0..SESSIONS {
        report(&mut pair, fleet, WORKERS - 1, &[block_of(session, 0)])?;
    }
    for (place, piece) in evicted.iter().enumerate() {
        let from = place as u32 * 23 % BLOCKS;
        let blocks = from..BLOCKS.min(from + piece.blocks);
        let hashes = blocks.map(|place| hash_of(block_of(piece.session, place))).collect();
        apply(&mut pair, fleet, piece.worker, OwnedAction::Revoke { tier: Tier::Hbm, hashes })?;
    }
    check(&mut pair)
}

proptest! {
    #![proptest_config(cases(10))]

    #[test]
    fn sessions_decoded_in_turn(
        fleet in select(&Fleet::ALL),
        tuning in select(&TUNINGS),
        stored in vec(piece(), 40..200),
        evicted in vec(piece(), 0..40),
    ) {
        // Every session has some of the pieces that are stored over and over.
        let each = (0..SESSIONS).map(|session| Piece { session, worker: session, blocks: 1 });
        let stored: Vec<Piece> = each.chain(stored).collect();
        prop_assert_eq!(run(fleet, tuning(), &stored, &evicted), Ok(()));
    }
}
