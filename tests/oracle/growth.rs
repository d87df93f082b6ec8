//! Growth: tens of thousands of blocks reported, cut, cleared and reported again, every block compared.
//!
//! Random histories stay small; here tables grow through several sizes, slots
//! pass the end of a chunk of 65,536, and holes are refilled at scale.

use sgl_kv_indexer::arena::{Tier, Tuning};

use crate::ops::{OwnedAction, OwnedBatch, Pool};
use crate::pair::{Checked, Pair};

const BLOCKS: u32 = 70_000;
/// Blocks of one report.
const STRETCH: u32 = 500;
/// Blocks of one look-up.
const LOOK_UP: u32 = 10_000;
/// Chains stored in turn, so that neither stands in one piece.
const CHAINS: u32 = 2;

struct Growth {
    pair: Pair,
    pool: Pool,
}

impl Growth {
    fn apply(&mut self, worker: u32, actions: Vec<OwnedAction>) {
        let batch = OwnedBatch {
            worker_id: format!("worker-{worker}"),
            address: format!("http://worker-{worker}"),
            spec: None,
            actions,
        };
        self.pair.apply(&batch).expect("a legal batch");
    }

    fn hashes(&self, blocks: impl Iterator<Item = u32>) -> Vec<i64> {
        blocks.map(|block| self.pool.hash(block)).collect()
    }

    fn report(&mut self, worker: u32, tier: Tier, blocks: impl Iterator<Item = u32>) {
        let hashes = self.hashes(blocks);
        for stretch in hashes.chunks(STRETCH as usize) {
            let (masks, tokens) = (Vec::new(), vec![16; stretch.len()]);
            self.apply(worker, vec![OwnedAction::Report { tier, hashes: stretch.to_vec(), masks, tokens }]);
        }
    }

    fn revoke(&mut self, worker: u32, tier: Tier, blocks: impl Iterator<Item = u32>) {
        let hashes = self.hashes(blocks);
        for stretch in hashes.chunks(STRETCH as usize) {
            self.apply(worker, vec![OwnedAction::Revoke { tier, hashes: stretch.to_vec() }]);
        }
    }

    fn clear(&mut self, worker: u32, tier: Tier) {
        self.apply(worker, vec![OwnedAction::Clear { tier }]);
    }

    /// Compares every block and some prompts.
    #[track_caller]
    fn check(&mut self, phase: &str) {
        if let Err(difference) = self.compare() {
            panic!("{:?}, {phase}: {difference}", self.pool);
        }
    }

    fn compare(&mut self) -> Checked {
        self.pair.audit()?;
        for start in (0..BLOCKS).step_by(LOOK_UP as usize) {
            let hashes = self.hashes(start..BLOCKS.min(start + LOOK_UP));
            self.pair.check_blocks(&hashes)?;
            self.pair.check_counts(&hashes)?;
        }
        for chain in 0..CHAINS {
            for length in [1, 100, 400] {
                let hashes = self.hashes(chain_blocks(chain).take(length));
                self.pair.check_prefix(&hashes, 0)?;
            }
        }
        Ok(())
    }
}

/// The blocks of a chain: stretches of it alternate with those of the others.
fn chain_blocks(chain: u32) -> impl Iterator<Item = u32> {
    let own = move |block: &u32| block / STRETCH % CHAINS == chain;
    (0..BLOCKS).filter(own)
}

fn check(pool: Pool, tuning: Tuning) {
    let mut growth = Growth { pair: Pair::new(tuning), pool };
    for worker in 0..2 {
        growth.report(worker, Tier::Hbm, 0..BLOCKS);
    }
    growth.report(2, Tier::Dram, chain_blocks(1));
    growth.check("reported");

    let counted = growth.hashes(0..STRETCH);
    growth.pair.count(&counted).expect("same counts");
    for stretch in (0..BLOCKS).step_by(STRETCH as usize) {
        let tail = stretch + STRETCH / 2..stretch + STRETCH;
        growth.revoke(0, Tier::Hbm, tail.clone());
        growth.revoke(1, Tier::Hbm, tail.rev());
    }
    growth.check("tails revoked");

    growth.revoke(0, Tier::Hbm, (0..BLOCKS).step_by(3));
    growth.revoke(1, Tier::Hbm, (0..BLOCKS).step_by(3));
    growth.check("holes cut");

    growth.report(1, Tier::Hbm, (0..BLOCKS).rev());
    growth.check("refilled, children first");

    growth.clear(1, Tier::Hbm);
    growth.clear(2, Tier::Dram);
    growth.check("two cleared");

    growth.clear(0, Tier::Hbm);
    growth.check("all cleared");
    growth.pair.settle().expect("an end of maintenance");
    growth.check("all cleared and settled");

    growth.report(3, Tier::Hbm, 0..BLOCKS);
    growth.report(0, Tier::Ssd, chain_blocks(0));
    growth.check("reported again");
}

#[test]
fn random_hashes() {
    check(Pool::Random, Tuning::default());
}

/// Every segment of the table is split on the way, each with another number of ids.
#[test]
fn a_table_whose_segments_are_split() {
    check(Pool::Random, Tuning { segment_bits: 4, segment_ids: 3_500, ..Tuning::default() });
}

#[test]
fn strided_hashes() {
    check(Pool::Strided(32), Tuning::default());
}
