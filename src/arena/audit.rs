//! The arena's check of itself, for tests.
//!
//! Walks everything and compares the tables with each other. The invariants are
//! numbered in [`super`]; a failure starts with the number of the one it breaks.

use std::collections::{HashMap, HashSet};

use roaring::RoaringBitmap;

use super::Arena;
use super::ids::{SetId, Tier};

impl Arena {
    pub(super) fn audit(&self) -> Result<(), String> {
        self.blocks.audit(&self.sets)?;
        self.table.audit(&self.blocks).map_err(|error| format!("I1: {error}"))?;
        self.sets.audit().map_err(|error| format!("I4: {error}"))?;
        self.workers.audit().map_err(|error| format!("I7: {error}"))?;
        self.audit_table()?;
        self.audit_holdings()?;
        if self.swept > 0 && !self.chunks_may_be_idle {
            return Err(format!("I10: a sweep for no chunk is at segment {}", self.swept));
        }
        self.audit_hits()
    }

    fn audit_table(&self) -> Result<(), String> {
        let mut known = 0;
        let mut hashes = HashSet::new();
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for (block, used) in self.blocks.known() {
            known += 1;
            let hash = self.blocks.hash(block);
            if self.table.find(hash, &self.blocks) != Some(block) {
                return Err(format!("I1: {block:?} is not found under its hash {hash}"));
            }
            if !hashes.insert(hash) {
                return Err(format!("I1: two slots have the hash {hash}"));
            }
            if used {
                *counts.entry(self.blocks.set(block).0).or_default() += 1;
            }
        }
        if known != self.table.len() {
            return Err(format!("I1: {known} slots are known and {} stand in the table", self.table.len()));
        }
        for (id, _, blocks) in self.sets.iter() {
            let counted = counts.remove(&id.0).unwrap_or(0);
            if counted != blocks {
                return Err(format!("I4: {id:?} counts {blocks} blocks and {counted} have it"));
            }
        }
        match counts.into_iter().next() {
            Some((id, _)) => Err(format!("I4: {:?} does not exist and blocks have it", SetId(id))),
            None => Ok(()),
        }
    }

    fn audit_holdings(&self) -> Result<(), String> {
        let mut noted: HashMap<(usize, usize, usize), (RoaringBitmap, u64)> = HashMap::new();
        for (block, _) in self.blocks.known() {
            for entry in self.sets.entries(self.blocks.set(block)) {
                for bit in (0..64).filter(|bit| entry.bits >> bit & 1 == 1) {
                    let place = (entry.word() * 64 + bit, entry.tier_index(), entry.generation());
                    let (blocks, masked) = noted.entry(place).or_default();
                    blocks.insert(block.0);
                    *masked += u64::from(entry.mask() != 0);
                }
            }
        }
        for (id, worker) in self.workers.iter() {
            for (tier, generation) in Tier::ALL.into_iter().flat_map(|tier| [(tier, 0), (tier, 1)]) {
                let holding = &worker.holdings[tier.index()][generation];
                let (blocks, masked) =
                    noted.remove(&(id.index(), tier.index(), generation)).unwrap_or_default();
                if blocks != holding.blocks || masked != holding.masked {
                    return Err(format!(
                        "I5: {id:?} at {tier:?}, generation {generation}, notes other blocks than it has"
                    ));
                }
                let waits = self.cleared.contains(&(id, tier));
                if generation != worker.current(tier) && !waits && !blocks.is_empty() {
                    return Err(format!(
                        "I6: {id:?} at {tier:?} has cleared placements that nobody cleans up"
                    ));
                }
            }
        }
        match noted.into_keys().next() {
            Some(place) => Err(format!("I5: placements belong to no worker: {place:?}")),
            None => Ok(()),
        }
    }

    fn audit_hits(&self) -> Result<(), String> {
        let used: HashSet<u32> =
            self.blocks.known().filter(|(_, used)| *used).map(|(block, _)| block.0).collect();
        match self.hits.lock().keys().find(|id| !used.contains(id)) {
            Some(id) => Err(format!("I8: slot {id} is not in use and has hits")),
            None => Ok(()),
        }
    }
}
