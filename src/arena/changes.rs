//! The latest changes of placement sets, to be made over again.
//!
//! Blocks that are changed together change alike, and so do those of one worker's next
//! report: the same holder joins or leaves the same set. What such a change led to is
//! kept here, by set and holder, so that it need not be computed and looked up again.
//! Sets have stamps that no other set ever had and that go with any change of their entries; a
//! change is good for as long as both its sets have theirs. So nothing has to be forgotten.

use super::ids::SetId;
use super::sets::Holder;

/// What no other set ever had, and a set has no more once its entries change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp(u64);

impl Stamp {
    /// That of no set, which stands for the empty one.
    pub(super) const NONE: Stamp = Stamp(0);

    /// The next stamp: of 2^64 the last is never given.
    pub(super) fn next(self) -> Stamp {
        Stamp(self.0 + 1)
    }
}

/// Changes kept: enough for a few hundred workers that report in turn, 7 KiB.
const KEPT: usize = 1 << 7;

/// That a set becomes `to` when `holder`, in it under `old`, gets `mask` or goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    pub(super) from_stamp: Stamp,
    pub(super) holder: Holder,
    pub(super) mask: Option<u32>,
    pub(super) old: Option<u32>,
    pub(super) to: SetId,
    pub(super) to_stamp: Stamp,
}

/// The latest changes, each in the place of its set and holder.
#[derive(Debug)]
pub(super) struct Changes(Box<[Option<Change>; KEPT]>);

impl Default for Changes {
    fn default() -> Self {
        Changes(Box::new([None; KEPT]))
    }
}

impl Changes {
    /// The change kept in the place of a set and holder, if it is of this holder and mask.
    ///
    /// It may be another set's: the stamps of both its sets are to be checked.
    #[inline]
    pub(super) fn get(&self, id: SetId, holder: Holder, mask: Option<u32>) -> Option<Change> {
        self.0[place(id, holder)].filter(|kept| kept.holder == holder && kept.mask == mask)
    }

    /// Keeps a change of the set `id`.
    pub(super) fn keep(&mut self, id: SetId, change: Change) {
        self.0[place(id, change.holder)] = Some(change);
    }
}

/// Neighbouring sets and neighbouring workers have places of their own, also where both
/// neighbours come together: sets are often made one after another, as workers report in turn.
#[inline]
fn place(id: SetId, holder: Holder) -> usize {
    (id.0 as usize).wrapping_add(2 * holder.number()) % KEPT
}
