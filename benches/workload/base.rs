//! The plain index that ours is compared with: one map from block to holders.
//!
//! It is what one would write first, and it costs a look-up per block and a step
//! per holder and block. It answers for whole blocks at one tier only.

use std::collections::HashMap;

use super::Workload;

/// Holders of each block, ascending.
#[derive(Debug, Default)]
pub(crate) struct Base {
    holders: HashMap<i64, Vec<u32>>,
}

impl Base {
    pub(crate) fn of(workload: &Workload) -> Base {
        let mut base = Base::default();
        for store in &workload.stores {
            base.store(store.worker, &store.hashes);
        }
        base
    }

    pub(crate) fn store(&mut self, worker: usize, hashes: &[i64]) {
        let worker = worker as u32;
        for hash in hashes {
            let holders = self.holders.entry(*hash).or_default();
            if let Err(place) = holders.binary_search(&worker) {
                holders.insert(place, worker);
            }
        }
    }

    pub(crate) fn remove(&mut self, worker: usize, hashes: &[i64]) {
        for hash in hashes {
            let Some(holders) = self.holders.get_mut(hash) else { continue };
            holders.retain(|holder| *holder != worker as u32);
            if holders.is_empty() {
                self.holders.remove(hash);
            }
        }
    }

    pub(crate) fn clear(&mut self, worker: usize) {
        self.holders.retain(|_, holders| {
            holders.retain(|holder| *holder != worker as u32);
            !holders.is_empty()
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.holders.len()
    }

    /// Worker and leading blocks, longest first, equal ones by worker.
    pub(crate) fn prefix(&self, prompt: &[i64]) -> Vec<(u32, u32)> {
        let mut rows = Vec::new();
        let mut alive: Vec<u32> = Vec::new();
        let mut depth = 0;
        for hash in prompt {
            let holders = self.holders.get(hash).map_or(&[][..], Vec::as_slice);
            if depth == 0 {
                alive = holders.to_vec();
            } else {
                alive.retain(|worker| {
                    let goes_on = holders.binary_search(worker).is_ok();
                    if !goes_on {
                        rows.push((*worker, depth));
                    }
                    goes_on
                });
            }
            if alive.is_empty() {
                break;
            }
            depth += 1;
        }
        rows.extend(alive.into_iter().map(|worker| (worker, depth)));
        rows.sort_unstable_by_key(|(worker, blocks)| (u32::MAX - blocks, *worker));
        rows
    }
}
