//! Exact-block match and hit counts.
//!
//! A match is done in two steps, because its answer can have millions of rows.
//! Under the read lock blocks are only found and the distinct sets among them
//! copied ([`find_blocks`]); the answer is laid out by worker afterwards
//! ([`FoundBlocks::by_worker`]). A look-up guesses the next slot like a scan; where two guesses in a
//! row have failed, the next hashes are looked up together.

use nohash_hasher::IntMap;
use roaring::RoaringBitmap;

use crate::arena::{BlockId, Located, PackedHashes, ReadView, SetId, TOGETHER, Tier, WorkerId};

/// What of a list of blocks is held, by whom and where.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockMatches {
    /// One row per worker that holds any of the blocks, ascending.
    pub workers: Vec<WorkerBlocks>,
    /// Tokens of the block at each position of the request; 0 where unknown or not held.
    pub tokens: Vec<u32>,
}

/// Blocks held by one worker.
#[derive(Debug, PartialEq, Eq)]
pub struct WorkerBlocks {
    /// Who.
    pub worker: WorkerId,
    /// One row per tier with any of the blocks, ascending.
    pub tiers: Vec<TierBlocks>,
}

/// Blocks held by one worker at one tier.
#[derive(Debug, PartialEq, Eq)]
pub struct TierBlocks {
    /// Where.
    pub tier: Tier,
    /// Positions in the request, ascending; a repeated hash stands at its first place only.
    pub positions: Vec<u32>,
    /// Component masks, one per position.
    pub masks: Vec<u32>,
}

/// Workers of one word of the fleet that hold a block alike.
#[derive(Debug, Clone, Copy)]
struct Holders {
    word: usize,
    tier: Tier,
    mask: u32,
    bits: u64,
}

/// The blocks of a request that are held, as found under the read lock.
#[derive(Debug, Default)]
pub struct FoundBlocks {
    /// Position in the request and number of the set, by ascending position.
    found: Vec<(u32, usize)>,
    /// For each distinct set the end of its holders in `holders`.
    ends: Vec<usize>,
    holders: Vec<Holders>,
    tokens: Vec<u32>,
}

/// Visits each distinct block of `hashes` that stands in the index, with its first position.
fn distinct(view: &ReadView, hashes: PackedHashes<'_>, mut visit: impl FnMut(u32, BlockId)) {
    let hashes = hashes.as_bytes();
    let mut seen = RoaringBitmap::new();
    let mut located = [Located::NOWHERE; TOGETHER];
    let (mut from, mut to, mut apart) = (0, 0, false);
    let mut previous: Option<BlockId> = None;
    for (position, hash) in hashes.iter().enumerate() {
        let behind = previous.and_then(|block| view.behind(block, *hash));
        previous = match behind {
            None if apart => {
                if position >= to {
                    (from, to) = (position, hashes.len().min(position + TOGETHER));
                    view.locate_all(&hashes[from..to], &mut located);
                }
                located[position - from].held()
            }
            None => view.find(i64::from_le_bytes(*hash)),
            found => found,
        };
        apart = behind.is_none();
        if let Some(block) = previous.filter(|block| seen.insert(block.0)) {
            visit(position as u32, block);
        }
    }
}

/// Looks each of `hashes` up by itself; `count` adds one to the hit count of each that is held.
pub fn find_blocks(view: &ReadView, hashes: PackedHashes<'_>, count: bool) -> FoundBlocks {
    let mut answer = FoundBlocks { tokens: vec![0; hashes.len()], ..FoundBlocks::default() };
    let mut numbers: IntMap<u32, Option<usize>> = IntMap::default();
    let mut held = Vec::new();
    distinct(view, hashes, |position, block| {
        let set = view.set(block);
        if let Some(number) = *numbers.entry(set.0).or_insert_with(|| answer.add_set(view, set)) {
            answer.found.push((position, number));
            answer.tokens[position as usize] = view.tokens(block);
            held.push(block);
        }
    });
    if count {
        view.with_hits(|hits| {
            for block in &held {
                *hits.entry(block.0).or_default() += 1;
            }
        });
    }
    answer
}

/// Finds blocks and lays them out at once, where nobody waits for the view.
pub fn match_blocks(view: &ReadView, hashes: PackedHashes<'_>, count: bool) -> BlockMatches {
    find_blocks(view, hashes, count).by_worker()
}

/// Position and hit count of each of `hashes` that has a count, repeats left out.
pub fn hit_counts(view: &ReadView, hashes: PackedHashes<'_>) -> Vec<(u32, u64)> {
    view.with_hits(|hits| {
        let mut counts = Vec::new();
        if !hits.is_empty() {
            distinct(view, hashes, |position, block| {
                if let Some(count) = hits.get(&block.0).filter(|_| view.is_held(view.set(block))) {
                    counts.push((position, *count));
                }
            });
        }
        counts
    })
}

impl FoundBlocks {
    /// Copies the holders of a set; `None` if it has none any more.
    fn add_set(&mut self, view: &ReadView, set: SetId) -> Option<usize> {
        let before = self.holders.len();
        for entry in view.entries(set) {
            let bits = view.fleet()[entry.word()].answering(*entry);
            if bits != 0 {
                self.holders.push(Holders {
                    word: entry.word(),
                    tier: entry.tier(),
                    mask: entry.mask(),
                    bits,
                });
            }
        }
        (self.holders.len() > before).then(|| {
            self.ends.push(self.holders.len());
            self.ends.len() - 1
        })
    }

    /// Lays the blocks out by worker and tier.
    pub fn by_worker(self) -> BlockMatches {
        let mut rows: IntMap<u32, TierBlocks> = IntMap::default();
        for (position, number) in &self.found {
            let start = number.checked_sub(1).map_or(0, |before| self.ends[before]);
            for holders in &self.holders[start..self.ends[*number]] {
                let mut bits = holders.bits;
                while bits != 0 {
                    let worker = holders.word as u32 * 64 + bits.trailing_zeros();
                    bits &= bits - 1;
                    let row = rows.entry(worker << 2 | holders.tier as u32).or_insert_with(|| TierBlocks {
                        tier: holders.tier,
                        positions: Vec::new(),
                        masks: Vec::new(),
                    });
                    row.positions.push(*position);
                    row.masks.push(holders.mask);
                }
            }
        }
        let mut rows: Vec<(u32, TierBlocks)> = rows.into_iter().collect();
        rows.sort_unstable_by_key(|(key, _)| *key);
        let mut workers: Vec<WorkerBlocks> = Vec::new();
        for (key, row) in rows {
            let worker = WorkerId(key >> 2);
            match workers.last_mut() {
                Some(last) if last.worker == worker => last.tiers.push(row),
                _ => workers.push(WorkerBlocks { worker, tiers: vec![row] }),
            }
        }
        BlockMatches { workers, tokens: self.tokens }
    }
}
