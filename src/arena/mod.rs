//! The index's memory: blocks, placement sets, workers.
//!
//! The arena answers one question fast: who holds the block with this hash, and
//! the next one, and the next. It knows nothing of gRPC, sockets or time.
//!
//! | part | what it is |
//! |---|---|
//! | `blocks`, `chunk` | chunked columns of hash, placement set and tokens by slot |
//! | `lane` | the columns as a scan walks them |
//! | `departures` | who leaves a chain and where, listed for scans |
//! | `table`, `segment`, `bucket` | hash to slot, in segments that grow one at a time |
//! | `sets` | interned placement sets; blocks with equal holders share one |
//! | `changes` | the latest changes of sets, to be made over again |
//! | `workers` | names, cache specs, and per tier a bitmap of the slots held |
//! | `apply` | changes the parts, a stretch of blocks at a time |
//! | `gather` | blocks of a chain that lie apart are laid side by side |
//! | `clear` | clears, and the clean-up that they put off |
//! | `view`, `shared` | what readers see, and the one lock |
//! | `audit` | checks the invariants below |
//!
//! Invariants, between two changes. The audit names the one that fails:
//!
//! - I1. Every slot in use and every ghost stands in the table once, under its
//!   hash, and is counted where it passed; nothing else stands there; no two slots
//!   of the table share a hash.
//! - I2. A slot's set is the empty one exactly if the slot is free.
//! - I3. Edge bits stand exactly where neighbouring slots have different sets.
//! - I4. Sets are orderly and distinct, and count the blocks that have them.
//! - I5. A worker's bitmap of a tier and generation holds exactly the slots whose
//!   set has that placement, and counts those with components.
//! - I6. A generation that is not current is empty or waits to be cleaned up.
//! - I7. The fleet's bits say what the workers say; a worker that is gone has no name
//!   and waits for its clean-up.
//! - I8. Hit counts belong to slots in use.
//! - I9. A list of departures says what the sets of its section say.
//! - I10. A sweep for ghosts of idle chunks is under way only while chunks may be idle.

mod apply;
mod audit;
mod bits;
mod blocks;
mod bucket;
mod changes;
mod chunk;
mod clear;
mod departures;
mod fetch;
mod gather;
mod hashes;
mod idle;
mod ids;
mod lane;
mod mix;
mod mutation;
mod segment;
mod sets;
mod shared;
mod table;
mod view;
mod workers;

use std::collections::VecDeque;

use nohash_hasher::IntMap;
use parking_lot::Mutex;

pub use hashes::PackedHashes;
pub use ids::{Tier, WorkerId};
pub use mutation::{Action, Batch, BatchError, CacheSpec};
pub use shared::{Index, Outcome, ReadGuard};
pub use view::{Placement, ReadView, Sizes};
pub use workers::{Label, Labels};

pub(crate) use blocks::Located;
pub(crate) use departures::{Departure, Leg, Stop};
pub(crate) use ids::{BlockId, SetId};
pub(crate) use lane::{Lane, Slots};
pub(crate) use sets::Entry;
pub(crate) use table::TOGETHER;
pub(crate) use workers::FleetWord;

use blocks::Blocks;
use gather::Wishes;
use mix::Mix;
use sets::Sets;
use table::{Table, Upcoming};
use workers::Workers;

/// Hostile settings for tests; the default is what every index runs with.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Tuning {
    /// Slots of a chunk in use, 1 to 65,536.
    pub chunk_slots: usize,
    /// The table begins with two to the power of this many segments.
    pub segment_bits: u32,
    /// Ids with which such a segment is split at the latest.
    pub segment_ids: usize,
    /// Stores no two blocks side by side, so that every guess of a scan fails.
    pub scattered: bool,
    /// Where the keys of the mix come from.
    pub keys: Keys,
}

/// Keys of the mix that block hashes go through.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// Drawn anew for every index, so that nobody can choose hashes against them.
    Random,
    /// The same for every index, so that counts of its work repeat.
    Fixed,
    /// Mixes every hash to zero, so that all of them collide.
    Colliding,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            chunk_slots: blocks::CHUNK_SLOTS,
            segment_bits: table::SEGMENT_BITS,
            segment_ids: table::SEGMENT_IDS,
            scattered: false,
            keys: Keys::Random,
        }
    }
}

/// All tables of the index, changed only by `apply` and `clear`.
#[derive(Debug)]
struct Arena {
    blocks: Blocks,
    table: Table,
    /// The look-ups of the report or revoke at hand.
    upcoming: Upcoming,
    sets: Sets,
    workers: Workers,
    /// Times a counting look-up matched the block. A reader that counts locks it
    /// while it holds the read lock; a writer owns it anyway.
    hits: Mutex<IntMap<u32, u64>>,
    /// Generations that were cleared and still have placements in the sets.
    cleared: VecDeque<(WorkerId, Tier)>,
    /// Whether a chunk may have lost its last block since the last look.
    chunks_may_be_idle: bool,
    /// What scans found apart and maintenance may lay side by side.
    wishes: Wishes,
    /// So many hashes are to be applied before there may be room again for what scans find apart.
    gathers_after: usize,
    /// The segment from which a sweep of the table for idle chunks' ghosts goes on; 0 if none is under way.
    swept: usize,
}

impl Arena {
    fn new(tuning: Tuning) -> Self {
        let mix = match tuning.keys {
            Keys::Random => Mix::random(),
            Keys::Fixed => Mix::fixed(),
            Keys::Colliding => Mix::colliding(),
        };
        Arena {
            blocks: Blocks::new(tuning.chunk_slots, tuning.scattered),
            table: Table::new(mix, tuning.segment_bits, tuning.segment_ids),
            upcoming: Upcoming::default(),
            sets: Sets::new(mix),
            workers: Workers::default(),
            hits: Mutex::default(),
            cleared: VecDeque::new(),
            chunks_may_be_idle: false,
            wishes: Wishes::default(),
            gathers_after: 0,
            swept: 0,
        }
    }
}
