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

/// Blocks that workers report and clear before, so many that they are not cleaned up at once: the workers'
/// later placements are of another generation, and they lie among ghosts.
const ASIDE: u32 = 1_100;

/// As usual; in chunks of a few blocks or some more; with one segment, whose buckets are full at times; with one bucket and tag for all.
const TUNINGS: [fn() -> Tuning; 5] = [
    Tuning::default,
    || Tuning { chunk_slots: 20, ..Tuning::default() },
    || Tuning { chunk_slots: 512, ..Tuning::default() },
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
    // Around eight, where a scan goes over from looking up to comparing and back.
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
        pair.check_counts(&chain)?;
    }
    pair.audit()
}

/// Asks as the blocks lie, and once maintenance has laid side by side what the scans found apart.
fn check_and_gather(pair: &mut Pair) -> Checked {
    check(pair)?;
    pair.settle()?;
    check(pair)
}

fn clear(pair: &mut Pair, fleet: Fleet, worker: u32) -> Checked {
    apply(pair, fleet, worker, OwnedAction::Clear { tier: Tier::Hbm })
}

fn run(fleet: Fleet, tuning: Tuning, stored: &[Piece], evicted: &[Piece]) -> Checked {
    let mut pair = Pair::new(tuning);
    for worker in 0..3 {
        let aside: Vec<u32> = (0..ASIDE).map(|block| (10 + worker) * ASIDE + block).collect();
        report(&mut pair, fleet, worker, &aside)?;
        clear(&mut pair, fleet, worker)?;
    }
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
    let hit: Vec<i64> = (0..SESSIONS * BLOCKS).step_by(7).map(hash_of).collect();
    pair.count(&hit)?;
    check_and_gather(&mut pair)?;
    // A round of all sessions' next blocks in one report, as of an engine's step.
    let round: Vec<u32> =
        (0..BLOCKS).flat_map(|place| (0..SESSIONS).map(move |session| block_of(session, place))).collect();
    report(&mut pair, fleet, WORKERS, &round)?;
    check_and_gather(&mut pair)?;
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
    check_and_gather(&mut pair)
}

/// Stores two sessions block by block in turn, each on so many workers of its own.
fn two_sessions(fleet: Fleet, holders: u32) -> Result<Pair, String> {
    let mut pair = Pair::default();
    for place in 0..BLOCKS {
        for (session, holder) in (0..2).flat_map(|session| (0..holders).map(move |holder| (session, holder)))
        {
            report(&mut pair, fleet, 10 * session + holder, &[block_of(session, place)])?;
        }
    }
    Ok(pair)
}

/// Runs of blocks with one set before and after a scan of both sessions and maintenance.
fn gathered(pair: &mut Pair) -> Result<[usize; 2], String> {
    let before = pair.index.read().sizes().runs;
    check_and_gather(pair)?;
    Ok([before, pair.index.read().sizes().runs])
}

#[test]
fn what_a_scan_found_apart_is_laid_side_by_side() {
    let apart = 2 * BLOCKS as usize;
    let [plain, _, _, mamba, ..] = Fleet::ALL;
    // Where every seventh block has another mask, it has another set.
    let few = |fleet: &str| if fleet == "mamba" { 8 + 2 * apart / 7 } else { 8 };
    let shapes = [("plain", plain, 1), ("plain", plain, 3), ("plain", plain, 9), ("mamba", mamba, 1)];
    for (name, fleet, holders) in shapes {
        let runs = two_sessions(fleet, holders).and_then(|mut pair| gathered(&mut pair));
        // Of each session the first blocks, which a scan has passed before it knows, and the rest; what lay between.
        let laid =
            runs.as_ref().map(|[before, after]| (*before == apart, *after <= few(name), *after == apart));
        let moves = holders <= 8;
        assert_eq!(laid, Ok((true, moves, !moves)), "{name}, {holders} holders: {runs:?}");
    }
}

#[test]
fn a_chunk_that_all_blocks_have_left_is_given_back() {
    const CHUNK: u32 = 256;
    let left = || {
        let mut pair = Pair::new(Tuning { chunk_slots: CHUNK as usize, ..Tuning::default() });
        let plain = Fleet::ALL[0];
        // Two sessions and some filling in the first chunk, none of which is evicted last.
        let sessions: Vec<u32> =
            (0..120).flat_map(|place| [block_of(0, place), block_of(1, place)]).collect();
        let filling: Vec<u32> = (sessions.len() as u32..CHUNK).map(|place| block_of(2, place)).collect();
        for block in sessions.iter().chain(&filling) {
            report(&mut pair, plain, 0, &[*block])?;
        }
        report(&mut pair, plain, 1, &(20 * ASIDE..20 * ASIDE + 8).collect::<Vec<u32>>())?;
        let hashes = filling.into_iter().map(hash_of).collect();
        apply(&mut pair, plain, 0, OwnedAction::Revoke { tier: Tier::Hbm, hashes })?;
        let before = pair.index.read().sizes();
        check_and_gather(&mut pair)?;
        let after = pair.index.read().sizes();
        Ok::<_, String>((before.blocks == after.blocks, before.block_bytes == 2 * after.block_bytes))
    };
    assert_eq!(left(), Ok((true, true)));
}

#[test]
fn a_prompt_that_repeats_a_block_moves_nothing() {
    let repeated = two_sessions(Fleet::ALL[0], 1).and_then(|mut pair| {
        let before = pair.index.read().sizes().runs;
        let there_and_back = (0..BLOCKS).chain((0..BLOCKS).rev()).map(|place| hash_of(block_of(0, place)));
        let prompt: Vec<i64> = there_and_back.collect();
        // So short that its first wish has both ways.
        pair.check_prefix(&prompt[100..200], 0)?;
        pair.settle()?;
        pair.check_prefix(&prompt[100..200], 0)?;
        pair.audit()?;
        Ok((before, pair.index.read().sizes().runs))
    });
    assert_eq!(repeated, Ok((2 * BLOCKS as usize, 2 * BLOCKS as usize)));
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
