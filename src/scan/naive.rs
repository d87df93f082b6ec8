//! The oracle: the contract's rules read literally, row by row, over plain maps.
//!
//! Tests compare the index with it. It must stay obviously right at a glance, so
//! it shares nothing with what it judges but the borrowed batch types: no runs,
//! no interned sets, no early ends. A prefix costs the square of its length, for
//! every worker there is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;

use crate::arena::{Action, Batch, BatchError, CacheSpec, PackedHashes, Tier};

/// Everything ever reported and not yet taken back.
#[derive(Debug, Clone, Default)]
pub struct NaiveIndex {
    workers: BTreeMap<String, Worker>,
    /// Known token counts of held blocks; none is 0.
    tokens: HashMap<i64, u32>,
    /// Hit counts of held blocks; none is 0.
    hits: HashMap<i64, u64>,
}

#[derive(Debug, Clone, Default)]
struct Worker {
    address: String,
    spec: Option<CacheSpec>,
    /// Left out of answers.
    silent: bool,
    /// Component mask of each placement.
    placements: BTreeMap<(i64, Tier), u32>,
}

/// What one worker holds of the blocks asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// The worker's name.
    pub worker_id: String,
    /// Its address, perhaps empty.
    pub address: String,
    /// Tiers with any of the blocks, ascending.
    pub tiers: Vec<TierRow>,
}

/// What one worker holds at one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierRow {
    /// Where.
    pub tier: Tier,
    /// The blocks, in request order.
    pub blocks: Vec<BlockRow>,
}

/// One block held at one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRow {
    /// First place of the block in the request.
    pub position: u32,
    /// Its hash.
    pub hash: i64,
    /// Mask of the placement.
    pub mask: u32,
    /// Tokens of the block, 0 if unknown.
    pub tokens: u32,
}

impl NaiveIndex {
    /// Applies a batch whole, or refuses it whole.
    ///
    /// # Errors
    /// The batch breaks a rule; the first one met is told.
    pub fn apply(&mut self, batch: &Batch<'_>) -> Result<(), BatchError> {
        check(batch)?;
        let worker = self.workers.entry(batch.worker_id.to_owned()).or_default();
        worker.address = batch.worker_address.to_owned();
        worker.spec = batch.cache_spec;
        worker.silent = false;
        for action in batch.actions {
            match *action {
                Action::Report { tier, hashes, masks, tokens } => {
                    for (position, hash) in hashes.iter().enumerate() {
                        let mask = masks.get(position).copied().unwrap_or(0);
                        let tokens = tokens.get(position).copied().unwrap_or(0);
                        self.report(batch.worker_id, tier, hash, mask, tokens);
                    }
                }
                Action::Revoke { tier, hashes } => {
                    for hash in hashes.iter() {
                        self.remove(batch.worker_id, tier, hash);
                    }
                }
                Action::ClearTier { tier } => {
                    let placements = &self.workers[batch.worker_id].placements;
                    let held: Vec<i64> =
                        placements.keys().filter(|(_, at)| *at == tier).map(|(hash, _)| *hash).collect();
                    for hash in held {
                        self.remove(batch.worker_id, tier, hash);
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes a worker and all that it holds; says whether there was one.
    pub fn remove_worker(&mut self, worker_id: &str) -> bool {
        let Some(worker) = self.workers.get(worker_id) else { return false };
        let held: Vec<(i64, Tier)> = worker.placements.keys().copied().collect();
        for (hash, tier) in held {
            self.remove(worker_id, tier, hash);
        }
        self.workers.remove(worker_id);
        true
    }

    /// Leaves a worker out of answers, until its next batch or until told otherwise.
    pub fn put_silent(&mut self, worker_id: &str, silent: bool) {
        if let Some(worker) = self.workers.get_mut(worker_id) {
            worker.silent = silent;
        }
    }

    fn report(&mut self, worker_id: &str, tier: Tier, hash: i64, mask: u32, tokens: u32) {
        let worker = self.workers.get_mut(worker_id).expect("made by apply");
        worker.placements.insert((hash, tier), mask);
        if tokens != 0 {
            self.tokens.insert(hash, tokens);
        }
    }

    fn remove(&mut self, worker_id: &str, tier: Tier, hash: i64) {
        let worker = self.workers.get_mut(worker_id).expect("made by apply");
        let was_held = worker.placements.remove(&(hash, tier)).is_some();
        if was_held && !self.is_held(hash) {
            self.tokens.remove(&hash);
            self.hits.remove(&hash);
        }
    }

    fn is_held(&self, hash: i64) -> bool {
        self.workers.values().any(|worker| worker.holds(hash))
    }

    fn tokens(&self, hash: i64) -> u32 {
        self.tokens.get(&hash).copied().unwrap_or(0)
    }

    /// Id, address and reusable leading blocks of each routable worker that can reuse any;
    /// longest first, equal ones by id.
    pub fn prefix(&self, hashes: &[i64]) -> Vec<(String, String, u32)> {
        let mut matches: Vec<(String, String, u32)> = self
            .workers
            .iter()
            .filter(|(_, worker)| !worker.address.is_empty() && !worker.silent)
            .map(|(id, worker)| (id.clone(), worker.address.clone(), self.prefix_of(worker, hashes)))
            .filter(|(_, _, blocks)| *blocks > 0)
            .collect();
        matches.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
        matches
    }

    /// How many positions an exact scan of `hashes` may say it looked at.
    ///
    /// A miss of the first block settles everything, so then it is 1. Otherwise the block that
    /// ends the longest prefix must have been seen, and a scan may stop there or look on, but
    /// never at more than it was asked about.
    pub fn blocks_read(&self, hashes: &[i64]) -> RangeInclusive<u32> {
        let length = u32::try_from(hashes.len()).expect("a short prompt");
        match hashes.first() {
            None => 0..=0,
            Some(first) if !self.is_held(*first) => 1..=1,
            Some(_) => {
                let best = self.prefix(hashes).first().map_or(0, |longest| longest.2);
                length.min(best + 1)..=length
            }
        }
    }

    /// The largest boundary at which the worker's rule holds.
    fn prefix_of(&self, worker: &Worker, hashes: &[i64]) -> u32 {
        let rule_holds = |n: &usize| match &worker.spec {
            None => holds_all(worker, &hashes[..*n]),
            Some(spec) => self.spec_allows(worker, spec, &hashes[..*n]),
        };
        let reusable = match &worker.spec {
            None if hashes.iter().any(|hash| worker.has_mask(*hash)) => 0,
            Some(spec) if !can_match(spec) => 0,
            _ => (1..=hashes.len()).rev().find(rule_holds).unwrap_or(0),
        };
        u32::try_from(reusable).expect("a short prompt")
    }

    /// Whether a worker with this spec can resume after exactly these leading blocks.
    fn spec_allows(&self, worker: &Worker, spec: &CacheSpec, leading: &[i64]) -> bool {
        let carries = |hash: i64, component: u32, tiers: u32| {
            [Tier::Hbm, Tier::Dram].into_iter().any(|tier| {
                tiers & tier.mask_bit() != 0
                    && worker.placements.get(&(hash, tier)).is_some_and(|mask| mask & component != 0)
            })
        };
        let full = |hash: &i64| carries(*hash, CacheSpec::FULL, spec.full_tier_mask);
        let swa = |hash: &i64| carries(*hash, CacheSpec::SWA, spec.swa_tier_mask);
        let mamba = |hash: &i64| carries(*hash, CacheSpec::MAMBA, spec.mamba_tier_mask);

        let last = leading.last().expect("a boundary follows a block");
        let run: Vec<i64> = leading.iter().rev().copied().take_while(|hash| swa(hash)).collect();
        let run_tokens: u64 = run.iter().map(|hash| u64::from(self.tokens(*hash))).sum();
        let window_covered = run.len() == leading.len() || run_tokens >= u64::from(spec.swa_window_tokens);

        leading.iter().all(full)
            && (spec.components & CacheSpec::SWA == 0 || (swa(last) && window_covered))
            && (spec.components & CacheSpec::MAMBA == 0 || mamba(last))
    }

    /// What each worker, routable or not, holds of the blocks; workers that hold none are left out.
    pub fn match_blocks(&self, hashes: &[i64]) -> Vec<WorkerRow> {
        let distinct = distinct(hashes);
        let tier_row = |worker: &Worker, tier: Tier| TierRow {
            tier,
            blocks: distinct
                .iter()
                .filter_map(|(position, hash)| {
                    let mask = *worker.placements.get(&(*hash, tier))?;
                    Some(BlockRow { position: *position, hash: *hash, mask, tokens: self.tokens(*hash) })
                })
                .collect(),
        };
        let mut rows = Vec::new();
        for (id, worker) in self.workers.iter().filter(|(_, worker)| !worker.silent) {
            let mut tiers: Vec<TierRow> = Tier::ALL.iter().map(|tier| tier_row(worker, *tier)).collect();
            tiers.retain(|row| !row.blocks.is_empty());
            if !tiers.is_empty() {
                rows.push(WorkerRow { worker_id: id.clone(), address: worker.address.clone(), tiers });
            }
        }
        rows
    }

    /// Adds one to the hit count of each distinct block that anyone holds who is not silent.
    pub fn count_hits(&mut self, hashes: &[i64]) {
        for (_, hash) in distinct(hashes) {
            if self.workers.values().any(|worker| !worker.silent && worker.holds(hash)) {
                *self.hits.entry(hash).or_default() += 1;
            }
        }
    }

    /// First position and hit count of each block with a count, in request order.
    pub fn hit_counts(&self, hashes: &[i64]) -> Vec<(u32, u64)> {
        distinct(hashes)
            .into_iter()
            .filter_map(|(position, hash)| Some((position, *self.hits.get(&hash)?)))
            .collect()
    }

    /// Names of all workers that ever sent a batch and were not removed.
    pub fn worker_ids(&self) -> impl Iterator<Item = &str> {
        self.workers.keys().map(String::as_str)
    }
}

impl Worker {
    fn holds(&self, hash: i64) -> bool {
        Tier::ALL.iter().any(|tier| self.placements.contains_key(&(hash, *tier)))
    }

    fn has_mask(&self, hash: i64) -> bool {
        Tier::ALL.iter().any(|tier| self.placements.get(&(hash, *tier)).is_some_and(|mask| *mask != 0))
    }
}

fn holds_all(worker: &Worker, leading: &[i64]) -> bool {
    leading.iter().all(|hash| worker.holds(*hash))
}

/// Whether the spec can match anything at all.
fn can_match(spec: &CacheSpec) -> bool {
    let windowless = spec.components & CacheSpec::SWA != 0 && spec.swa_window_tokens == 0;
    spec.components != 0 && spec.version <= 1 && !windowless
}

/// Each distinct hash at its first position.
fn distinct(hashes: &[i64]) -> Vec<(u32, i64)> {
    let mut seen = BTreeSet::new();
    (0..).zip(hashes.iter().copied()).filter(|(_, hash)| seen.insert(*hash)).collect()
}

fn check(batch: &Batch<'_>) -> Result<(), BatchError> {
    if batch.worker_id.is_empty() {
        return Err(BatchError::EmptyWorkerId);
    }
    for (place, action) in batch.actions.iter().enumerate() {
        match *action {
            Action::Report { hashes, masks, tokens, .. } => {
                check_hashes(place, hashes)?;
                for metadata in [masks, tokens] {
                    if !metadata.is_empty() && metadata.len() != hashes.len() {
                        return Err(BatchError::MetadataLength {
                            action: place,
                            hashes: hashes.len(),
                            metadata: metadata.len(),
                        });
                    }
                }
            }
            Action::Revoke { hashes, .. } => check_hashes(place, hashes)?,
            Action::ClearTier { .. } => {}
        }
    }
    Ok(())
}

fn check_hashes(action: usize, hashes: PackedHashes<'_>) -> Result<(), BatchError> {
    if hashes.is_empty() { Err(BatchError::NoHashes { action }) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
