//! Holes: blocks cut out of a long chain and stored again, at every place where a scan changes its step.
//!
//! A scan compares some hundreds of blocks at a time, and a freed slot keeps its
//! hash, so a hole looks like the chain until its set is looked at.

use sgl_kv_indexer::arena::Tier;

use crate::ops::{OwnedAction, OwnedBatch, Pool};
use crate::pair::Pair;

/// Long enough for several comparisons.
const BLOCKS: u32 = 700;

fn apply(pair: &mut Pair, worker: u32, action: OwnedAction) {
    let batch = OwnedBatch {
        worker_id: format!("worker-{worker}"),
        address: format!("http://worker-{worker}"),
        spec: None,
        actions: vec![action],
    };
    pair.apply(&batch).expect("a legal batch");
}

fn report(pair: &mut Pair, worker: u32, hashes: &[i64]) {
    let (hashes, masks, tokens) = (hashes.to_vec(), Vec::new(), Vec::new());
    apply(pair, worker, OwnedAction::Report { tier: Tier::Hbm, hashes, masks, tokens });
}

fn check(pair: &mut Pair, hashes: &[i64], phase: &str) {
    let outcome =
        pair.audit().and_then(|()| pair.check_prefix(hashes, 0)).and_then(|()| pair.check_blocks(hashes));
    outcome.unwrap_or_else(|difference| panic!("{phase}: {difference}"));
}

#[test]
fn a_hole_ends_every_prefix_until_it_is_filled() {
    let chain: Vec<i64> = (0..BLOCKS).map(|block| Pool::Random.hash(block)).collect();
    for hole in [0, 1, 100, 254, 255, 256, 257, 511, 512, 513, BLOCKS - 1] {
        for width in [1, 2, 9, 300] {
            let cut = &chain[hole as usize..chain.len().min((hole + width) as usize)];
            let mut pair = Pair::default();
            for holders in [1, 2] {
                (0..holders).for_each(|worker| report(&mut pair, worker, &chain));
                let phase = |what: &str| format!("{what}, {holders} holders, {width} blocks at {hole}");
                for worker in 0..holders {
                    apply(&mut pair, worker, OwnedAction::Revoke { tier: Tier::Hbm, hashes: cut.to_vec() });
                    check(&mut pair, &chain, &phase("cut"));
                }
                // Stored again together, then in pieces from the back.
                report(&mut pair, 0, cut);
                check(&mut pair, &chain, &phase("filled"));
                apply(&mut pair, 0, OwnedAction::Revoke { tier: Tier::Hbm, hashes: cut.to_vec() });
                cut.iter().rev().take(9).for_each(|hash| report(&mut pair, 0, &[*hash]));
                check(&mut pair, &chain, &phase("filled from the back"));
            }
        }
    }
}
