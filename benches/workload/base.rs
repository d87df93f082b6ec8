//! The plain index to compare with: a map from hash to holders, asked block by block.

use std::collections::HashMap;

/// Whole blocks in device memory, by hash.
#[derive(Debug, Default)]
pub(crate) struct PlainIndex {
    holders: HashMap<i64, Vec<u32>>,
}

impl PlainIndex {
    pub(crate) fn report(&mut self, worker: u32, hashes: &[i64]) {
        for hash in hashes {
            let holders = self.holders.entry(*hash).or_default();
            if let Err(place) = holders.binary_search(&worker) {
                holders.insert(place, worker);
            }
        }
    }

    pub(crate) fn revoke(&mut self, worker: u32, hashes: &[i64]) {
        for hash in hashes {
            if let Some(holders) = self.holders.get_mut(hash) {
                holders.retain(|holder| *holder != worker);
                if holders.is_empty() {
                    self.holders.remove(hash);
                }
            }
        }
    }

    /// Worker and leading blocks of everybody who holds the first one.
    pub(crate) fn prefix(&self, hashes: &[i64]) -> Vec<(u32, u32)> {
        let mut alive: Vec<u32> =
            hashes.first().and_then(|hash| self.holders.get(hash)).cloned().unwrap_or_default();
        let mut ended = Vec::with_capacity(alive.len());
        for (at, hash) in hashes.iter().enumerate().skip(1) {
            let holders = self.holders.get(hash).map_or(&[][..], Vec::as_slice);
            alive.retain(|worker| {
                let holds = holders.binary_search(worker).is_ok();
                if !holds {
                    ended.push((*worker, at as u32));
                }
                holds
            });
            if alive.is_empty() {
                return ended;
            }
        }
        ended.extend(alive.into_iter().map(|worker| (worker, hashes.len() as u32)));
        ended
    }
}
