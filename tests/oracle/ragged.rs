//! Ragged chains: many workers hold one chain, each to another depth, and the depths move.
//!
//! The arena lists who departs where, by sections of 256 slots, when a scan asks for it. Sets are made, changed
//! where they stand, given back and made again with the ids that others had, so
//! whatever is listed goes stale in every way; each state is scanned twice and more.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use sgl_kv_indexer::arena::{CacheSpec, PackedHashes, Tier};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use crate::histories::cases;
use crate::ops::{OwnedAction, OwnedBatch, Pool};
use crate::pair::{Checked, Pair};

/// Who holds blocks of the chain, by order of arrival: a few workers of each of three words, so that any of
/// the words may be the next to have no holder any more.
const HOLDERS: [u32; 13] = [0, 1, 2, 30, 63, 64, 66, 100, 127, 128, 129, 130, 131];

const WORKERS: u32 = 132;

const BLOCKS: u32 = 30;

/// Blocks of other chains that are stored before it, so that it lies across two sections.
const FILLER: u32 = 240;

/// A chain beside it, so long that a clear of a worker that holds it is not carried out at once: what the worker
/// held of the ragged chain is still in the sets then, and belongs to nobody.
const ASIDE: std::ops::Range<u32> = 1_000..2_100;

const FULL: u32 = CacheSpec::FULL;
const SWA: u32 = CacheSpec::FULL | CacheSpec::SWA;
const MAMBA: u32 = CacheSpec::FULL | CacheSpec::MAMBA;

/// The components that workers' specs have, by worker in turn; 0 is no spec.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fleet([u32; 4]);

impl Fleet {
    pub(crate) const ALL: [Fleet; 6] = [
        Fleet([0; 4]),
        Fleet([FULL; 4]),
        Fleet([SWA; 4]),
        Fleet([MAMBA; 4]),
        Fleet([0, 0, 0, FULL]),
        Fleet([0, FULL, SWA, MAMBA]),
    ];

    fn components(self, worker: u32) -> u32 {
        self.0[worker as usize % 4]
    }

    pub(crate) fn spec(self, worker: u32) -> Option<CacheSpec> {
        let components = self.components(worker);
        (components != 0).then(|| CacheSpec {
            version: 1,
            components,
            swa_window_tokens: 64,
            full_tier_mask: Tier::Hbm.mask_bit() | Tier::Dram.mask_bit(),
            swa_tier_mask: Tier::Hbm.mask_bit(),
            mamba_tier_mask: Tier::Hbm.mask_bit(),
        })
    }

    /// The mask that a worker's block has as a rule: a Mamba state stands at every seventh.
    pub(crate) fn mask(self, worker: u32, block: u32) -> u32 {
        self.components(worker) & if block % 7 == 6 { !0 } else { !CacheSpec::MAMBA }
    }
}

/// What one worker does, to the blocks between two places of the chain.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Report,
    ReportMasked(u32),
    ReportAt(Tier),
    Revoke,
    Clear,
    /// Reports [`ASIDE`], whatever the two places.
    ReportAside,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    worker: u32,
    turn: Turn,
    from: u32,
    to: u32,
}

fn moves() -> impl Strategy<Value = Move> {
    let turn = prop_oneof![
        8 => Just(Turn::Report),
        3 => select(&[0, FULL, SWA, MAMBA, SWA | MAMBA]).prop_map(Turn::ReportMasked),
        1 => Just(Turn::ReportAt(Tier::Dram)),
        8 => Just(Turn::Revoke),
        2 => Just(Turn::Clear),
        1 => Just(Turn::ReportAside),
    ];
    // Mostly from the head or to the end, as chains grow and are evicted.
    let from = prop_oneof![2 => Just(0), 1 => 0..BLOCKS];
    let to = prop_oneof![1 => Just(BLOCKS), 2 => 1..=BLOCKS];
    (select(&HOLDERS), turn, from, to).prop_map(|(worker, turn, from, to)| {
        let (from, to) = (from.min(to - 1), to);
        Move { worker, turn, from, to }
    })
}

fn chain(from: u32, to: u32) -> Vec<i64> {
    (from..to).map(|block| Pool::Random.hash(block)).collect()
}

fn apply(pair: &mut Pair, fleet: Fleet, change: Move) -> Checked {
    let Move { worker, turn, from, to } = change;
    let (from, to) = if let Turn::ReportAside = turn { (ASIDE.start, ASIDE.end) } else { (from, to) };
    let hashes = chain(from, to);
    let report = |tier, mask: Option<u32>| OwnedAction::Report {
        tier,
        hashes: hashes.clone(),
        masks: (from..to).map(|block| mask.unwrap_or(fleet.mask(worker, block))).collect(),
        tokens: vec![16; hashes.len()],
    };
    let action = match turn {
        Turn::Report | Turn::ReportAside => report(Tier::Hbm, None),
        Turn::ReportMasked(mask) => report(Tier::Hbm, Some(mask)),
        Turn::ReportAt(tier) => report(tier, None),
        Turn::Revoke => OwnedAction::Revoke { tier: Tier::Hbm, hashes: hashes.clone() },
        Turn::Clear => OwnedAction::Clear { tier: Tier::Hbm },
    };
    pair.apply(&OwnedBatch {
        worker_id: format!("worker-{worker}"),
        address: "http://worker:30000".to_owned(),
        spec: fleet.spec(worker),
        actions: vec![action],
    })
}

/// Scans the chain from several of its blocks on, the first time to have listed what later ones are told.
fn check(pair: &mut Pair) -> Checked {
    for from in [0, 1, BLOCKS / 2] {
        (0..2).try_for_each(|_| pair.check_prefix(&chain(from, BLOCKS), 0))?;
    }
    pair.audit()
}

/// So many workers arrive with a block that is not of the chain, so that holders have the ids meant for them.
fn arrivals(workers: u32) -> impl Iterator<Item = Move> {
    (0..workers).map(|worker| Move { worker, turn: Turn::Report, from: BLOCKS, to: BLOCKS + 1 })
}

#[test]
fn a_scan_stops_where_the_last_candidate_departs() {
    let fleets = [Fleet([0; 4]), Fleet([FULL; 4]), Fleet([SWA; 4])];
    // In one word, and in six, of which one after another is left by its last; with one more that lacks the head,
    // so that it is no candidate, and stays.
    let shapes = [(1, true), (1, false), (40, true), (40, false)];
    for (fleet, (apart, one_stays)) in fleets.into_iter().flat_map(|fleet| shapes.map(|shape| (fleet, shape)))
    {
        let mut pair = Pair::default();
        let report = |worker, from, to| Move { worker, turn: Turn::Report, from, to };
        let stays = one_stays.then(|| report(9 * apart, 1, BLOCKS));
        let reports = (1..9).map(|worker| report(worker * apart, 0, 3 * worker)).chain(stays);
        let applied: Checked =
            arrivals(9 * apart + 1).chain(reports).try_for_each(|change| apply(&mut pair, fleet, change));
        assert_eq!(applied, Ok(()));
        let packed = PackedHashes::pack(&chain(0, BLOCKS));
        let packed = PackedHashes::new(&packed).expect("whole hashes");
        let mut scratch = PrefixScratch::default();
        for _ in 0..3 {
            let read = prefix(&pair.index.read(), packed, &mut scratch);
            assert_eq!((read, scratch.matches().len()), (3 * 8 + 1, 8), "{fleet:?}, {apart} apart");
        }
        assert_eq!(check(&mut pair), Ok(()));
    }
}

#[test]
fn a_sliding_window_counts_from_where_its_run_starts() {
    // Windows are four blocks long: of runs that begin within the prompt, some are shorter at the worker's end.
    for fleet in [Fleet([SWA; 4]), Fleet([0, FULL, SWA, MAMBA])] {
        for blocks in 1..7 {
            let mut pair = Pair::default();
            let turn = |worker, turn, to| Move { worker, turn, from: 0, to };
            let turns = (1..9).flat_map(|worker| {
                let end: u32 = 3 * worker;
                let without = end.saturating_sub(blocks).max(1);
                [turn(worker, Turn::Report, end), turn(worker, Turn::ReportMasked(FULL), without)]
            });
            let applied: Checked = turns.into_iter().try_for_each(|change| apply(&mut pair, fleet, change));
            let checked = applied.and_then(|()| check(&mut pair));
            assert_eq!(checked, Ok(()), "{fleet:?}, {blocks} blocks with a window");
        }
    }
}

proptest! {
    #![proptest_config(cases(30))]

    #[test]
    fn departures_are_told_as_they_are_while_depths_move(
        fleet in select(&Fleet::ALL),
        ends in vec(1..=BLOCKS, HOLDERS.len()),
        moves in vec(moves(), 1..40),
        clears_wait in any::<bool>(),
    ) {
        let mut pair = Pair::default();
        let report = |worker, from, to| Move { worker, turn: Turn::Report, from, to };
        let arrivals = arrivals(WORKERS).chain([report(0, BLOCKS + 1, BLOCKS + FILLER)]);
        let starts = HOLDERS.into_iter().zip(ends).map(|(worker, to)| report(worker, 0, to));
        let aside = |worker| Move { worker, turn: Turn::ReportAside, from: 0, to: 0 };
        let asides = HOLDERS.into_iter().filter(|_| clears_wait).map(aside);
        let mut begin = arrivals.chain(starts).chain(asides);
        let checked = begin.try_for_each(|start| apply(&mut pair, fleet, start)).and_then(|()| {
            moves.into_iter().try_for_each(|change| {
                check(&mut pair)?;
                apply(&mut pair, fleet, change)?;
                check(&mut pair).map_err(|fault| format!("after {change:?}: {fault}"))
            })
        });
        prop_assert_eq!(checked, Ok(()));
    }
}
