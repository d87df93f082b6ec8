//! Ragged chains: many workers hold one chain, each to another depth, and the depths move.
//!
//! The arena lists who departs where, by sections of 256 slots, when a scan asks for it. Sets are made, changed
//! where they stand, given back and made again with the ids that others had, so
//! whatever is listed goes stale in every way; each state is scanned twice and more.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use sgl_kv_indexer::arena::Tier;

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

/// What one worker does, to the blocks between two places of the chain.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Report(u32),
    ReportAt(Tier),
    Revoke,
    Clear,
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
        8 => Just(Turn::Report(0)),
        1 => (1u32..4).prop_map(Turn::Report),
        1 => Just(Turn::ReportAt(Tier::Dram)),
        8 => Just(Turn::Revoke),
        1 => Just(Turn::Clear),
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

fn apply(pair: &mut Pair, change: Move) -> Checked {
    let hashes = chain(change.from, change.to);
    let report = |tier, mask: u32| {
        let masks = if mask == 0 { Vec::new() } else { vec![mask; hashes.len()] };
        OwnedAction::Report { tier, hashes: hashes.clone(), masks, tokens: Vec::new() }
    };
    let action = match change.turn {
        Turn::Report(mask) => report(Tier::Hbm, mask),
        Turn::ReportAt(tier) => report(tier, 0),
        Turn::Revoke => OwnedAction::Revoke { tier: Tier::Hbm, hashes: hashes.clone() },
        Turn::Clear => OwnedAction::Clear { tier: Tier::Hbm },
    };
    pair.apply(&OwnedBatch {
        worker_id: format!("worker-{}", change.worker),
        address: "http://worker:30000".to_owned(),
        spec: None,
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

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn departures_are_told_as_they_are_while_depths_move(
        ends in vec(1..=BLOCKS, HOLDERS.len()),
        moves in vec(moves(), 1..40),
    ) {
        let mut pair = Pair::default();
        let report = |worker, from, to| Move { worker, turn: Turn::Report(0), from, to };
        // All arrive with a block that is not of the chain, so that holders have the ids meant for them.
        let arrivals = (0..WORKERS).map(|worker| report(worker, BLOCKS, BLOCKS + 1));
        let arrivals = arrivals.chain([report(0, BLOCKS + 1, BLOCKS + FILLER)]);
        let starts = HOLDERS.into_iter().zip(ends).map(|(worker, to)| report(worker, 0, to));
        let checked = arrivals.chain(starts).try_for_each(|start| apply(&mut pair, start)).and_then(|()| {
            moves.into_iter().try_for_each(|change| {
                check(&mut pair)?;
                apply(&mut pair, change)?;
                check(&mut pair).map_err(|fault| format!("after {change:?}: {fault}"))
            })
        });
        prop_assert_eq!(checked, Ok(()));
    }
}
