//! Workers: names, cache specs, and what each holds where.
//!
//! A worker's id is its bit in the placement sets. For every 64 workers a
//! [`FleetWord`] says, as bits, what a scan must know of them: which follow
//! which rule, which tiers count for which component. A scan thus applies the
//! rules to 64 workers with a few word operations.
//!
//! Per tier a worker has two *generations* of placements, one of them current.
//! To clear a tier the current one becomes the other: from then on all old
//! placements belong to nobody, whatever their number, and they are taken out
//! of the sets bit by bit afterwards. A bitmap per tier and generation says
//! which blocks a placement of the worker stands at.
//!
//! A worker that is removed is *gone*: it loses its name and its label, and all its
//! placements are cleared. Its id is free for another worker only once none of them
//! is left in any set. A *silent* worker keeps everything and is left out of answers
//! until its next batch.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use roaring::RoaringBitmap;
use slab::Slab;

use super::ids::{Tier, WorkerId};
use super::mutation::CacheSpec;
use super::sets::{Entry, Holder};

/// Most workers at a time: their words must fit a set entry's key with room to spare.
pub(crate) const WORKERS_MAX: usize = 1 << 20;

/// A worker's two names, and a place where an edge keeps its own encoding of them.
///
/// A label never changes: a new address makes a new label.
#[derive(Debug)]
pub struct Label {
    id: Box<str>,
    address: Box<str>,
    wire: OnceLock<Box<[u8]>>,
}

impl Label {
    /// The worker's name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// URL under which routers reach it; empty if none.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The edge's encoding of this label, made by `encode` when it is first asked for.
    pub fn wire(&self, encode: impl FnOnce(&Label) -> Box<[u8]>) -> &[u8] {
        self.wire.get_or_init(|| encode(self))
    }
}

/// The labels of all workers at one moment; keeping it holds up nothing.
#[derive(Debug, Clone, Default)]
pub struct Labels(Arc<Vec<Option<Arc<Label>>>>);

impl Labels {
    /// The label of `worker`, if it exists in this snapshot.
    pub fn get(&self, worker: WorkerId) -> Option<&Label> {
        self.0.get(worker.index())?.as_deref()
    }

    /// All of them, by ascending worker.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerId, &Label)> {
        let labels = self.0.iter().enumerate();
        labels.filter_map(|(index, label)| Some((WorkerId(index as u32), label.as_deref()?)))
    }

    fn put(&mut self, worker: WorkerId, label: Option<Arc<Label>>) {
        let labels = Arc::make_mut(&mut self.0);
        if labels.len() <= worker.index() {
            labels.resize(worker.index() + 1, None);
        }
        labels[worker.index()] = label;
    }
}

/// What a scan must know of 64 workers, one bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FleetWord {
    /// Has an address and is not silent.
    pub(crate) routable: u64,
    /// Is left out of answers.
    silent: u64,
    /// Has no cache spec: whole blocks at any tier count.
    pub(crate) plain: u64,
    /// Plain, and some current placement has components: it may fail closed.
    pub(crate) masked: u64,
    /// Its spec needs SWA at the boundary; see `spec_of`.
    pub(crate) swa: u64,
    /// Its spec needs Mamba at the boundary.
    pub(crate) mamba: u64,
    /// The current generation is the second, by tier.
    pub(crate) second: [u64; 3],
    /// Its spec can match at all, and takes FULL from this tier.
    pub(crate) full_tiers: [u64; 3],
    /// The same for SWA.
    pub(crate) swa_tiers: [u64; 3],
    /// The same for Mamba.
    pub(crate) mamba_tiers: [u64; 3],
}

impl FleetWord {
    /// Clears every bit of a worker.
    fn forget(&mut self, bit: u64) {
        let FleetWord {
            routable,
            silent,
            plain,
            masked,
            swa,
            mamba,
            second,
            full_tiers,
            swa_tiers,
            mamba_tiers,
        } = self;
        let by_tier = second.iter_mut().chain(full_tiers).chain(swa_tiers).chain(mamba_tiers);
        for bits in [routable, silent, plain, masked, swa, mamba].into_iter().chain(by_tier) {
            *bits &= !bit;
        }
    }

    /// The workers of an entry whose placements are of the current generation.
    #[inline]
    pub(crate) fn current(&self, entry: Entry) -> u64 {
        let second = self.second[entry.tier_index()];
        entry.bits & if entry.generation() == 0 { !second } else { second }
    }

    /// Those of them that answers may name.
    #[inline]
    pub(crate) fn answering(&self, entry: Entry) -> u64 {
        self.current(entry) & !self.silent
    }
}

/// A worker's placements at one tier in one generation.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    /// Blocks with a placement.
    pub(crate) blocks: RoaringBitmap,
    /// How many of the placements have a component mask other than 0.
    pub(crate) masked: u64,
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) spec: Option<CacheSpec>,
    pub(crate) seq: u64,
    /// Which of all batches was its last.
    pub(crate) heard: u64,
    /// Was removed, and waits until its placements are cleaned up.
    gone: bool,
    silent: bool,
    current: [u8; 3],
    pub(crate) holdings: [[Holding; 2]; 3],
}

impl Worker {
    fn new() -> Self {
        let holdings = Default::default();
        Worker { spec: None, seq: 0, heard: 0, gone: false, silent: false, current: [0; 3], holdings }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent
    }

    fn is_clean(&self) -> bool {
        self.holdings.iter().flatten().all(|holding| holding.blocks.is_empty())
    }

    /// Number of the tier's current generation.
    pub(crate) fn current(&self, tier: Tier) -> usize {
        usize::from(self.current[tier.index()])
    }

    /// What the worker holds at a tier.
    pub(crate) fn holding(&self, tier: Tier) -> &Holding {
        &self.holdings[tier.index()][self.current(tier)]
    }

    /// What of a tier has been cleared and not been cleaned up yet.
    pub(crate) fn cleared(&self, tier: Tier) -> &Holding {
        &self.holdings[tier.index()][1 - self.current(tier)]
    }
}

/// All workers.
///
/// Invariants: `names` and `labels` name the ids of `workers` that are not gone;
/// `fleet` says what `workers` says; bits of ids without a worker are clear; who is
/// gone holds nothing current and something cleared.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    workers: Slab<Worker>,
    names: HashMap<Box<str>, WorkerId, foldhash::fast::RandomState>,
    labels: Labels,
    fleet: Vec<FleetWord>,
    /// Batches recorded, of all workers.
    batches: u64,
}

impl Workers {
    /// Ids in use, those of workers that are gone included.
    pub(crate) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(crate) fn find(&self, name: &str) -> Option<WorkerId> {
        self.names.get(name).copied()
    }

    pub(crate) fn labels(&self) -> &Labels {
        &self.labels
    }

    pub(crate) fn fleet(&self) -> &[FleetWord] {
        &self.fleet
    }

    pub(crate) fn get(&self, id: WorkerId) -> &Worker {
        &self.workers[id.index()]
    }

    /// A worker that may be gone by now.
    pub(crate) fn get_if_known(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(id.index()).filter(|worker| !worker.gone)
    }

    pub(crate) fn holding_mut(&mut self, id: WorkerId, tier: Tier, generation: usize) -> &mut Holding {
        &mut self.workers[id.index()].holdings[tier.index()][generation]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.workers.iter().map(|(index, worker)| (WorkerId(index as u32), worker))
    }

    /// The holder under which the worker's next placement at a tier is kept.
    pub(crate) fn holder(&self, id: WorkerId, tier: Tier) -> Holder {
        Holder::new(id, tier, self.get(id).current(tier))
    }

    /// A new worker with a name that no other has.
    pub(crate) fn add(&mut self, name: &str, address: &str) -> WorkerId {
        let id = WorkerId(self.workers.insert(Worker::new()) as u32);
        self.names.insert(name.into(), id);
        if self.fleet.len() <= id.index() / 64 {
            self.fleet.push(FleetWord::default());
        }
        self.put_spec(id, None);
        self.put_label(id, Label { id: name.into(), address: address.into(), wire: OnceLock::new() });
        id
    }

    fn put_label(&mut self, id: WorkerId, label: Label) {
        self.labels.put(id, Some(Arc::new(label)));
        self.mend_routable(id);
    }

    fn mend_routable(&mut self, id: WorkerId) {
        let silent = self.workers[id.index()].silent;
        let routable = !silent && self.labels.get(id).is_some_and(|label| !label.address.is_empty());
        let (word, bit) = word_and_bit(&mut self.fleet, id);
        put(&mut word.routable, bit, routable);
        put(&mut word.silent, bit, silent);
    }

    /// Leaves a worker out of answers, or takes it in again.
    pub(crate) fn put_silent(&mut self, id: WorkerId, silent: bool) {
        self.workers[id.index()].silent = silent;
        self.mend_routable(id);
    }

    /// Takes name and label from a worker all of whose placements are cleared.
    pub(crate) fn let_go(&mut self, id: WorkerId) {
        if let Some(label) = self.labels.get(id) {
            self.names.remove(&*label.id);
        }
        self.labels.put(id, None);
        let worker = &mut self.workers[id.index()];
        worker.gone = true;
        worker.silent = false;
        let (word, bit) = word_and_bit(&mut self.fleet, id);
        // What is left of the worker must go on being told from what is current.
        let second = word.second;
        word.forget(bit);
        word.second = second;
    }

    /// Frees the id of a worker that is gone, if nothing of it is left.
    pub(crate) fn free_if_clean(&mut self, id: WorkerId) {
        if self.workers.get(id.index()).is_some_and(|worker| worker.gone && worker.is_clean()) {
            self.workers.remove(id.index());
            let (word, bit) = word_and_bit(&mut self.fleet, id);
            word.forget(bit);
        }
        if self.workers.is_empty() {
            *self = Workers { batches: self.batches, ..Workers::default() };
        }
    }

    /// Records what a batch says of its worker.
    pub(crate) fn record(&mut self, id: WorkerId, address: &str, spec: Option<CacheSpec>, seq: u64) {
        if let Some(label) = self.labels.get(id).filter(|label| label.address() != address) {
            let label = Label { id: label.id.clone(), address: address.into(), wire: OnceLock::new() };
            self.put_label(id, label);
        }
        self.batches += 1;
        let worker = &mut self.workers[id.index()];
        worker.seq = seq;
        worker.heard = self.batches;
        if worker.silent {
            self.put_silent(id, false);
        }
        if self.get(id).spec != spec {
            self.put_spec(id, spec);
        }
    }

    fn put_spec(&mut self, id: WorkerId, spec: Option<CacheSpec>) {
        self.workers[id.index()].spec = spec;
        let (word, bit) = word_and_bit(&mut self.fleet, id);
        put_spec(word, bit, spec);
    }

    /// Makes all placements of a worker at a tier belong to nobody.
    ///
    /// The other generation must have been cleaned up.
    pub(crate) fn turn_over(&mut self, id: WorkerId, tier: Tier) {
        let worker = &mut self.workers[id.index()];
        debug_assert!(worker.cleared(tier).blocks.is_empty(), "the generation to come is clean");
        worker.current[tier.index()] ^= 1;
        let (word, bit) = word_and_bit(&mut self.fleet, id);
        word.second[tier.index()] ^= bit;
        self.mend_masked(id);
    }

    /// Counts `more` placements with components, or fewer, of a worker at a tier in a generation.
    #[inline]
    pub(crate) fn count_masked(&mut self, id: WorkerId, tier: Tier, generation: usize, more: i64) {
        if more != 0 {
            let masked = &mut self.holding_mut(id, tier, generation).masked;
            *masked = masked.wrapping_add_signed(more);
            self.mend_masked(id);
        }
    }

    fn mend_masked(&mut self, id: WorkerId) {
        let worker = &self.workers[id.index()];
        let masked = Tier::ALL.iter().any(|tier| worker.holding(*tier).masked > 0);
        let (word, bit) = word_and_bit(&mut self.fleet, id);
        put(&mut word.masked, bit, masked);
    }

    /// Checks `fleet` and `labels` against the workers.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut fleet = vec![FleetWord::default(); self.fleet.len()];
        let mut named = 0;
        for (id, worker) in self.iter() {
            let (word, bit) = word_and_bit(&mut fleet, id);
            for tier in Tier::ALL {
                put(&mut word.second[tier.index()], bit, worker.current(tier) == 1);
            }
            if worker.gone {
                let holds = Tier::ALL.iter().any(|tier| !worker.holding(*tier).blocks.is_empty());
                if holds || worker.is_clean() || self.labels.get(id).is_some() {
                    return Err(format!(
                        "{id:?} is gone and has a label, holds something or waits for nothing"
                    ));
                }
                continue;
            }
            named += 1;
            let label = self.labels.get(id).ok_or_else(|| format!("{id:?} has no label"))?;
            if self.find(label.id()) != Some(id) {
                return Err(format!("{id:?} is not found as {}", label.id()));
            }
            let (word, bit) = word_and_bit(&mut fleet, id);
            put(&mut word.routable, bit, !label.address().is_empty() && !worker.silent);
            put(&mut word.silent, bit, worker.silent);
            put_spec(word, bit, worker.spec);
            let masked = Tier::ALL.iter().any(|tier| worker.holding(*tier).masked > 0);
            put(&mut word.masked, bit, masked);
        }
        if self.names.len() != named || fleet != self.fleet {
            return Err("the fleet's bits are not what the workers say".to_owned());
        }
        Ok(())
    }
}

fn word_and_bit(fleet: &mut [FleetWord], id: WorkerId) -> (&mut FleetWord, u64) {
    (&mut fleet[id.index() / 64], 1 << (id.0 % 64))
}

fn put(bits: &mut u64, bit: u64, value: bool) {
    *bits = *bits & !bit | if value { bit } else { 0 };
}

/// Writes what a cache spec means for a scan.
///
/// A spec that can never match, by its version, without components or with a
/// window of nothing, has no tier at all. SSD serves no worker with a spec.
fn put_spec(word: &mut FleetWord, bit: u64, spec: Option<CacheSpec>) {
    let usable = spec.filter(|spec| {
        let windowless = spec.components & CacheSpec::SWA != 0 && spec.swa_window_tokens == 0;
        spec.components != 0 && spec.version <= CacheSpec::VERSION_MAX && !windowless
    });
    let needs = |component: u32| usable.is_some_and(|spec| spec.components & component != 0);
    put(&mut word.plain, bit, spec.is_none());
    put(&mut word.swa, bit, needs(CacheSpec::SWA));
    put(&mut word.mamba, bit, needs(CacheSpec::MAMBA));
    for tier in [Tier::Hbm, Tier::Dram] {
        let served =
            |mask: fn(&CacheSpec) -> u32| usable.is_some_and(|spec| mask(&spec) & tier.mask_bit() != 0);
        put(&mut word.full_tiers[tier.index()], bit, served(|spec| spec.full_tier_mask));
        put(&mut word.swa_tiers[tier.index()], bit, served(|spec| spec.swa_tier_mask));
        put(&mut word.mamba_tiers[tier.index()], bit, served(|spec| spec.mamba_tier_mask));
    }
}
