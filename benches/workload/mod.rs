//! Seeded workloads that every bench and every peer runs: who stores what, and what is asked.
//!
//! A workload is a list of reports in order and a list of prompts, so that any
//! index can be filled with it. Hashes come from a counter through a mix: random
//! to look at, the same in every run.

#![allow(dead_code, reason = "each bench uses a part")]

pub(crate) mod base;
pub(crate) mod engines;

use sgl_kv_indexer::arena::{Action, Batch, CacheSpec, Index, PackedHashes, Tier};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

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
        Workload::stored_in_turn(seed, sharers, sessions, 32)
    }

    /// The same sessions as an engine stores what it decodes: block by block, each in turn
    /// with one of every other session.
    pub(crate) fn decoded(seed: u64, sharers: usize, sessions: usize) -> Workload {
        Workload::stored_in_turn(seed, sharers, sessions, 1)
    }

    fn stored_in_turn(seed: u64, sharers: usize, sessions: usize, stretch: usize) -> Workload {
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
        for from in (256..256 + 4 * 32).step_by(stretch) {
            seeded.shuffle(&mut order);
            for session in &order {
                workload.store(session % sharers, &chains[*session], from, from + stretch);
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

/// Asks every prompt once and lets maintenance lay the blocks side by side that were found apart.
pub(crate) fn gather(index: &Index, prompts: &[Vec<i64>]) {
    for some in prompts.chunks(32) {
        some.iter().for_each(|prompt| drop(answer(index, prompt)));
        settle(index);
    }
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

/// One action made ready, so that only its apply is timed or counted.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    worker_id: String,
    worker_address: String,
    placement: Placement,
    kind: Kind,
    packed: Vec<u8>,
    masks: Vec<u32>,
    tokens: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Report,
    Revoke,
    Clear,
}

impl Prepared {
    pub(crate) fn report(worker: usize, hashes: &[i64], placement: Placement) -> Self {
        let masks = if placement.mask == 0 { Vec::new() } else { vec![placement.mask; hashes.len()] };
        let tokens = vec![placement.tokens; hashes.len()];
        Prepared { masks, tokens, ..Prepared::new(Kind::Report, worker, hashes, placement) }
    }

    pub(crate) fn revoke(worker: usize, hashes: &[i64], placement: Placement) -> Self {
        Prepared::new(Kind::Revoke, worker, hashes, placement)
    }

    pub(crate) fn clear(worker: usize, placement: Placement) -> Self {
        Prepared::new(Kind::Clear, worker, &[], placement)
    }

    fn new(kind: Kind, worker: usize, hashes: &[i64], placement: Placement) -> Self {
        Prepared {
            worker_id: worker_name(worker),
            worker_address: worker_address(worker),
            placement,
            kind,
            packed: PackedHashes::pack(hashes),
            masks: Vec::new(),
            tokens: Vec::new(),
        }
    }

    pub(crate) fn apply(&self, index: &Index) {
        let tier = self.placement.tier;
        let hashes = PackedHashes::new(&self.packed).expect("packed");
        let action = match self.kind {
            Kind::Report => Action::Report { tier, hashes, masks: &self.masks, tokens: &self.tokens },
            Kind::Revoke => Action::Revoke { tier, hashes },
            Kind::Clear => Action::ClearTier { tier },
        };
        let batch = Batch {
            worker_id: &self.worker_id,
            worker_address: &self.worker_address,
            cache_spec: self.placement.spec,
            seq: 0,
            actions: &[action],
        };
        index.apply(&batch).expect("a good batch");
    }
}

/// The same kind of placement at another tier.
pub(crate) fn at(tier: Tier, placement: Placement) -> Placement {
    Placement { tier, ..placement }
}

/// Runs the put-off clean-up to its end.
pub(crate) fn settle(index: &Index) {
    while index.maintain() {}
}

/// How hashes are made, from a number that counts up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kinds {
    /// Random, what engines send.
    Random,
    /// 1, 2, 3 and so on.
    Dense,
    /// Multiples of two to the power of this.
    Strided(u32),
    /// The low 32 bits are all equal.
    SameLow,
    /// The high 32 bits are all equal.
    SameHigh,
}

impl Kinds {
    /// Each kind with a name for reports.
    pub(crate) const ALL: [(&'static str, Kinds); 8] = [
        ("random", Kinds::Random),
        ("dense", Kinds::Dense),
        ("strided-8", Kinds::Strided(8)),
        ("strided-16", Kinds::Strided(16)),
        ("strided-32", Kinds::Strided(32)),
        ("strided-40", Kinds::Strided(40)),
        ("same-low", Kinds::SameLow),
        ("same-high", Kinds::SameHigh),
    ];

    /// Distinct hashes number `from` to `from + count`, as long as numbers stay below 2^24.
    pub(crate) fn chain(self, from: usize, count: usize) -> Vec<i64> {
        (from..from + count).map(|number| self.hash(number as u64)).collect()
    }

    fn hash(self, number: u64) -> i64 {
        // Odd multiples keep numbers below 2^32 distinct there and spread them.
        let spread = number.wrapping_mul(0x9e37_79b9) & 0xffff_ffff;
        let hash = match self {
            Kinds::Random => Seeded::new(number << 8).next(),
            Kinds::Dense => number + 1,
            Kinds::Strided(shift) => (number + 1) << shift,
            Kinds::SameLow => spread << 32 | 0x1234_5678,
            Kinds::SameHigh => 0x1234_5678 << 32 | spread,
        };
        hash as i64
    }
}

/// A session that one to three workers hold.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) workers: Vec<usize>,
    pub(crate) chain: Vec<i64>,
}

/// Sessions that come and go over an index of steady size.
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    seeded: Seeded,
    workers: usize,
    pub(crate) live: Vec<Session>,
}

impl Fleet {
    /// Hashes of one report of a session's turn.
    const TURN: usize = 32;

    /// Sessions of 32 to 512 blocks, together at least `blocks`, stored turn by turn.
    pub(crate) fn new(seed: u64, workers: usize, blocks: usize, index: &Index) -> Fleet {
        let mut fleet = Fleet { seeded: Seeded::new(seed), workers, live: Vec::new() };
        while fleet.blocks() < blocks {
            let session = fleet.session();
            store(index, &session);
            fleet.live.push(session);
        }
        fleet
    }

    pub(crate) fn blocks(&self) -> usize {
        self.live.iter().map(|session| session.chain.len()).sum()
    }

    fn session(&mut self) -> Session {
        let turns = 1 + self.seeded.below(16);
        let first = self.seeded.below(self.workers);
        let holders = 1 + self.seeded.below(3);
        Session {
            workers: (0..holders).map(|place| (first + place) % self.workers).collect(),
            chain: self.seeded.chain(turns * Self::TURN),
        }
    }

    /// Evicts random sessions tail first, block by block, and stores new ones in
    /// their place, until a `tenths` part of the blocks is of new sessions.
    pub(crate) fn churn(&mut self, index: &Index, tenths: usize) {
        let mut old = self.live.len();
        let kept = old * (10 - tenths) / 10;
        while old > kept {
            let place = self.seeded.below(old);
            old -= 1;
            self.live.swap(place, old);
            evict(index, &self.live[old]);
            let session = self.session();
            store(index, &session);
            self.live[old] = session;
        }
    }

    /// An index that holds the same and has no past.
    pub(crate) fn fresh(&self) -> Index {
        let index = Index::new();
        for session in &self.live {
            store(&index, session);
        }
        index
    }
}

fn store(index: &Index, session: &Session) {
    for turn in session.chain.chunks(Fleet::TURN) {
        for worker in &session.workers {
            report(index, *worker, turn, PLAIN);
        }
    }
}

fn evict(index: &Index, session: &Session) {
    let backwards: Vec<i64> = session.chain.iter().rev().copied().collect();
    for leaves in backwards.chunks(8) {
        for worker in &session.workers {
            revoke(index, *worker, leaves);
        }
    }
}

/// Worker number and leading blocks of each match of `prompt`, in the order of [`base::Base::prefix`].
pub(crate) fn answer(index: &Index, prompt: &[i64]) -> Vec<(u32, u32)> {
    let packed = PackedHashes::pack(prompt);
    let view = index.read();
    let labels = view.labels();
    let mut scratch = PrefixScratch::default();
    prefix(&view, PackedHashes::new(&packed).expect("packed"), &mut scratch);
    let number = |name: &str| name.rsplit('-').next().and_then(|digits| digits.parse().ok());
    let mut rows: Vec<(u32, u32)> = scratch
        .matches()
        .iter()
        .map(|row| {
            let label = labels.get(row.worker).expect("a worker of this view");
            (number(label.id()).expect("a name of worker_name"), row.blocks)
        })
        .collect();
    rows.sort_unstable_by_key(|(worker, blocks)| (u32::MAX - blocks, *worker));
    rows
}

/// Lets branches come and go all over the only prompt of a filled workload:
/// each store's worker stores 32 blocks of its own, and loses them and the last
/// 32 blocks of the chain, which it then stores again.
pub(crate) fn branch(index: &Index, workload: &Workload, seed: u64) {
    let mut seeded = Seeded::new(seed);
    for _ in 0..4 {
        for store in &workload.stores {
            let branch = seeded.chain(32);
            let tail = &store.hashes[store.hashes.len().saturating_sub(32)..];
            report(index, store.worker, &branch, PLAIN);
            revoke(index, store.worker, &branch);
            revoke(index, store.worker, &tail.iter().rev().copied().collect::<Vec<i64>>());
            report(index, store.worker, tail, PLAIN);
        }
    }
}

/// Fills `index` with a workload.
pub(crate) fn fill(index: &Index, workload: &Workload, placement: Placement) {
    for store in &workload.stores {
        report(index, store.worker, &store.hashes, placement);
    }
}
