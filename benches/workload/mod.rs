//! Seeded workloads that every bench and every peer runs: who stores what, and what is asked.
//!
//! A workload is a list of reports in order and a list of prompts, so that any
//! index can be filled with it. Hashes come from a counter through a mix: random
//! to look at, the same in every run.

#![allow(dead_code, reason = "each bench uses a part")]

pub(crate) mod base;

use sgl_kv_indexer::arena::{Action, Batch, CacheSpec, Index, PackedHashes, Tier};

/// Hashes of one report: what the contract allows in one call.
pub(crate) const REPORT_HASHES: usize = 16_384;

/// A small generator with a fixed start.
#[derive(Debug, Clone)]
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Self {
        Seeded(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// A chain of `blocks` hashes.
    pub(crate) fn chain(&mut self, blocks: usize) -> Vec<i64> {
        (0..blocks).map(|_| self.next() as i64).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for place in (1..items.len()).rev() {
            items.swap(place, self.below(place + 1));
        }
    }
}

/// One worker stores a stretch of a chain.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) worker: usize,
    /// Hash of the block before the stretch, for indexes that want to know.
    pub(crate) parent: Option<i64>,
    pub(crate) hashes: Vec<i64>,
}

/// Stores in order, then prompts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Workload {
    pub(crate) stores: Vec<Store>,
    pub(crate) prompts: Vec<Vec<i64>>,
}

impl Workload {
    pub(crate) fn store(&mut self, worker: usize, chain: &[i64], from: usize, to: usize) {
        let mut parent = from.checked_sub(1).map(|before| chain[before]);
        for hashes in chain[from..to].chunks(REPORT_HASHES) {
            self.stores.push(Store { worker, parent, hashes: hashes.to_vec() });
            parent = hashes.last().copied();
        }
    }

    /// One chain of `blocks` blocks held whole by `holders` workers.
    pub(crate) fn even(seed: u64, blocks: usize, holders: usize) -> Workload {
        let mut workload = Workload::default();
        let chain = Seeded::new(seed).chain(blocks);
        for worker in 0..holders {
            workload.store(worker, &chain, 0, blocks);
        }
        workload.prompts.push(chain);
        workload
    }

    /// One chain of `blocks` blocks; each of `holders` workers ends elsewhere in it.
    pub(crate) fn ragged(seed: u64, blocks: usize, holders: usize) -> Workload {
        let mut workload = Workload::default();
        let mut seeded = Seeded::new(seed);
        let chain = seeded.chain(blocks);
        let mut ends: Vec<usize> = (1..=holders).map(|place| place * blocks / holders).collect();
        seeded.shuffle(&mut ends);
        for (worker, end) in ends.into_iter().enumerate() {
            workload.store(worker, &chain, 0, end);
        }
        workload.prompts.push(chain);
        workload
    }

    /// 256 blocks shared by `sharers` workers, then per session four turns of 32 blocks
    /// on one of them, stored later and interleaved with the other sessions' turns.
    ///
    /// Each prompt ends in 32 blocks that nobody has.
    pub(crate) fn conversations(seed: u64, sharers: usize, sessions: usize) -> Workload {
        let mut workload = Workload::default();
        let mut seeded = Seeded::new(seed);
        let shared = seeded.chain(256);
        for worker in 0..sharers {
            workload.store(worker, &shared, 0, 256);
        }
        let chains: Vec<Vec<i64>> = (0..sessions)
            .map(|_| shared.iter().copied().chain(seeded.chain(4 * 32 + 32)).collect())
            .collect();
        let mut order: Vec<usize> = (0..sessions).collect();
        for turn in 0..4 {
            seeded.shuffle(&mut order);
            for session in &order {
                let from = 256 + 32 * turn;
                workload.store(session % sharers, &chains[*session], from, from + 32);
            }
        }
        workload.prompts = chains;
        workload
    }
}

pub(crate) fn worker_name(worker: usize) -> String {
    format!("worker-{worker}")
}

pub(crate) fn worker_address(worker: usize) -> String {
    format!("http://10.0.{}.{}:30000", worker / 256, worker % 256)
}

/// How stores become reports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    pub(crate) tier: Tier,
    pub(crate) mask: u32,
    pub(crate) tokens: u32,
    pub(crate) spec: Option<CacheSpec>,
}

/// Whole blocks in device memory.
pub(crate) const PLAIN: Placement = Placement { tier: Tier::Hbm, mask: 0, tokens: 16, spec: None };

/// FULL and SWA, with a window of 64 tokens.
pub(crate) const SWA: Placement = Placement {
    tier: Tier::Hbm,
    mask: CacheSpec::FULL | CacheSpec::SWA,
    tokens: 16,
    spec: Some(CacheSpec {
        version: 1,
        components: CacheSpec::FULL | CacheSpec::SWA,
        swa_window_tokens: 64,
        full_tier_mask: 0b110,
        swa_tier_mask: 0b110,
        mamba_tier_mask: 0,
    }),
};

/// Applies one report of `worker`.
pub(crate) fn report(index: &Index, worker: usize, hashes: &[i64], placement: Placement) {
    let packed = PackedHashes::pack(hashes);
    let masks = vec![placement.mask; if placement.mask == 0 { 0 } else { hashes.len() }];
    let tokens = vec![placement.tokens; hashes.len()];
    act(
        index,
        worker,
        placement.spec,
        &[Action::Report {
            tier: placement.tier,
            hashes: PackedHashes::new(&packed).expect("packed"),
            masks: &masks,
            tokens: &tokens,
        }],
    );
}

/// Applies one revoke of `worker`.
pub(crate) fn revoke(index: &Index, worker: usize, hashes: &[i64]) {
    let packed = PackedHashes::pack(hashes);
    let hashes = PackedHashes::new(&packed).expect("packed");
    act(index, worker, None, &[Action::Revoke { tier: Tier::Hbm, hashes }]);
}

/// Applies actions of `worker`.
pub(crate) fn act(index: &Index, worker: usize, cache_spec: Option<CacheSpec>, actions: &[Action<'_>]) {
    let batch = Batch {
        worker_id: &worker_name(worker),
        worker_address: &worker_address(worker),
        cache_spec,
        seq: 0,
        actions,
    };
    index.apply(&batch).expect("a good batch");
}

/// Fills `index` with a workload.
pub(crate) fn fill(index: &Index, workload: &Workload, placement: Placement) {
    for store in &workload.stores {
        report(index, store.worker, &store.hashes, placement);
    }
}
