//! What a stream's worker holds, kept beside the stream so that a server can be told it anew.
//!
//! Events say only what changes. A server that lost its memory, or fell behind by
//! more than a queue may hold, needs everything; the engine cannot be asked for it. So
//! a bridge keeps what it has reported in an index of the same kind as the server's,
//! one for all streams of the process, in which each stream's worker is a worker.
//!
//! Invariant: the mirror holds exactly what a server holds that has taken all changes of
//! the stream. What does not fit the mirror is therefore not reported either.
//!
//! Cost: 21 to 24 bytes per distinct block of the process, 16,384 blocks copied in
//! about a millisecond.

use std::sync::Arc;

use crate::arena::{Action, Batch, BatchError, Index, PackedHashes, Placement, Tier};
use crate::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};
use crate::pb::{ExternalKvAction, ExternalKvActionType as Type, TierType};

/// Steps of clean-up that a stream does when it has nothing else to do.
const MAINTENANCE_STEPS: usize = 8;

/// One stream's part of the mirror.
#[derive(Debug, Clone)]
pub(super) struct Mirror {
    index: Arc<Index>,
    worker_id: Arc<str>,
    blocks_max: usize,
    /// Blocks of a page: what one RPC takes, but in tests.
    page_blocks: usize,
}

/// How far a worker's holdings have been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    tier: usize,
    slot: u32,
}

impl Cursor {
    /// Before everything.
    pub(super) const START: Cursor = Cursor { tier: 0, slot: 0 };
}

impl Mirror {
    /// An empty part of `index` for a worker; the index takes no further block at `blocks_max`.
    pub(super) fn new(index: Arc<Index>, worker_id: &str, blocks_max: usize) -> Self {
        Mirror { index, worker_id: worker_id.into(), blocks_max, page_blocks: HASHES_PER_CALL_MAX }
    }

    #[cfg(test)]
    pub(super) fn with_page(self, page_blocks: usize) -> Self {
        Mirror { page_blocks, ..self }
    }

    /// Takes changes in order; how many blocks did not fit, whose reports are taken out of `actions`.
    pub(super) fn apply(&self, actions: &mut Vec<ExternalKvAction>) -> usize {
        let mut left_out = 0;
        actions.retain(|action| {
            let blocks = if action.r#type() == Type::ActionReport { action.hashes.len() } else { 0 };
            let fits = blocks == 0 || self.index.read().blocks() + blocks <= self.blocks_max;
            if fits {
                self.apply_one(action);
            } else {
                left_out += blocks;
            }
            fits
        });
        left_out
    }

    /// Takes it that the worker holds nothing at any tier.
    pub(super) fn empty(&self) {
        for tier in Tier::ALL {
            let applied = self.apply_action(Action::ClearTier { tier });
            debug_assert!(applied.is_ok(), "a clear keeps the contract: {applied:?}");
        }
        self.clean_up();
    }

    /// Placements that the worker holds.
    pub(super) fn placements(&self) -> u64 {
        let view = self.index.read();
        let Some(worker) = view.find_worker(&self.worker_id) else { return 0 };
        Tier::ALL.iter().map(|tier| view.holdings(worker, *tier)).sum()
    }

    fn apply_one(&self, action: &ExternalKvAction) {
        let packed = PackedHashes::pack(&action.hashes);
        let Some(action) = borrowed(action, &packed) else { return };
        let applied = self.apply_action(action);
        debug_assert!(applied.is_ok(), "a chunker's actions keep the contract: {applied:?}");
    }

    fn apply_action(&self, action: Action<'_>) -> Result<(), BatchError> {
        self.index.apply(&Batch {
            worker_id: &self.worker_id,
            worker_address: "",
            cache_spec: None,
            seq: 0,
            actions: &[action],
        })
    }

    /// The next reports of all that the worker holds, as many as one RPC takes; `None` for
    /// the cursor after the last of them.
    pub(super) fn page(&self, from: Cursor) -> (Vec<ExternalKvAction>, Option<Cursor>) {
        let view = self.index.read();
        let Some(worker) = view.find_worker(&self.worker_id) else { return (Vec::new(), None) };
        let mut page = Page::default();
        let Cursor { mut tier, mut slot } = from;
        while let Some(at) = Tier::ALL.get(tier) {
            let room = self.page_blocks - page.hashes;
            if room == 0 {
                return (page.actions, Some(Cursor { tier, slot }));
            }
            let next = view.holdings_from(worker, *at, slot, room, |placement| page.report(*at, placement));
            match next {
                Some(next) => slot = next,
                None => (tier, slot) = (tier + 1, 0),
            }
        }
        (page.actions, None)
    }

    /// What is true now of blocks that `take` gives: reports of those held, revokes of the
    /// others, as many as one RPC takes.
    pub(super) fn truth(&self, mut take: impl FnMut() -> Option<(Tier, i64)>) -> Vec<ExternalKvAction> {
        let view = self.index.read();
        let worker = view.find_worker(&self.worker_id);
        let mut page = Page::default();
        while page.hashes < self.page_blocks
            && page.actions.len() < ACTIONS_PER_APPLY_MAX
            && let Some((tier, hash)) = take()
        {
            match worker.and_then(|worker| view.placement(worker, tier, hash)) {
                Some(placement) => page.report(tier, placement),
                None => page.revoke(tier, hash),
            }
        }
        page.actions
    }

    /// Does all the clean-up that clears leave behind; for a start, when nobody waits.
    pub(super) fn clean_up(&self) {
        while self.index.maintain() {}
    }

    /// Does a share of the clean-up that clears leave behind.
    pub(super) fn maintain(&self) {
        for _ in 0..MAINTENANCE_STEPS {
            if !self.index.maintain() {
                return;
            }
        }
    }
}

fn borrowed<'a>(action: &'a ExternalKvAction, packed: &'a [u8]) -> Option<Action<'a>> {
    let tier = Tier::from_wire(action.tier)?;
    let hashes = PackedHashes::new(packed)?;
    match action.r#type() {
        Type::ActionReport => {
            let (masks, tokens) = (&action.component_masks[..], &action.block_sizes[..]);
            Some(Action::Report { tier, hashes, masks, tokens })
        }
        Type::ActionRevoke => Some(Action::Revoke { tier, hashes }),
        Type::ActionClearAllAtTier => Some(Action::ClearTier { tier }),
        Type::ActionUnknown => None,
    }
}

/// Actions being made, neighbours of one kind and tier joined.
#[derive(Debug, Default)]
struct Page {
    actions: Vec<ExternalKvAction>,
    hashes: usize,
}

impl Page {
    fn report(&mut self, tier: Tier, placement: Placement) {
        let action = self.action(Type::ActionReport, tier);
        action.hashes.push(placement.hash);
        action.component_masks.push(placement.mask);
        action.block_sizes.push(placement.tokens);
    }

    fn revoke(&mut self, tier: Tier, hash: i64) {
        self.action(Type::ActionRevoke, tier).hashes.push(hash);
    }

    fn action(&mut self, kind: Type, tier: Tier) -> &mut ExternalKvAction {
        self.hashes += 1;
        let wanted = (i32::from(kind), tier.wire());
        if self.actions.last().is_none_or(|last| (last.r#type, last.tier) != wanted) {
            let (r#type, tier) = wanted;
            self.actions.push(ExternalKvAction { r#type, tier, ..ExternalKvAction::default() });
        }
        match self.actions.last_mut() {
            Some(action) => action,
            None => unreachable!("one was pushed"),
        }
    }
}

/// A tier as the wire names it.
pub(super) fn tier_of(tier: TierType) -> Option<Tier> {
    Tier::from_wire(tier.into())
}
