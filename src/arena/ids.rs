//! Dense ids and the tier.
//!
//! Everything inside the arena is named by a small integer of a type of its
//! own. Ids are reused once nothing refers to them; none leaves the process.

/// Where a worker keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// Device memory.
    Hbm = 1,
    /// Host memory.
    Dram = 2,
    /// Local storage.
    Ssd = 3,
}

impl Tier {
    /// Every tier, ascending.
    pub const ALL: [Tier; 3] = [Tier::Hbm, Tier::Dram, Tier::Ssd];

    /// The tier with this number on the wire, if it is one.
    pub fn from_wire(number: i32) -> Option<Tier> {
        match number {
            1 => Some(Tier::Hbm),
            2 => Some(Tier::Dram),
            3 => Some(Tier::Ssd),
            _ => None,
        }
    }

    /// The tier's number on the wire.
    pub fn wire(self) -> i32 {
        self as i32
    }

    /// The tier's bit in a cache spec's tier mask.
    pub fn mask_bit(self) -> u32 {
        1 << self as u32
    }

    /// The tier's place in a table of one row per tier.
    pub(crate) fn index(self) -> usize {
        self as usize - 1
    }
}

/// A worker, as a dense number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub(crate) u32);

impl WorkerId {
    /// The worker's row in a table by worker.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A block: its chunk in the upper, its slot in the lower 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    pub(crate) fn new(chunk: usize, slot: usize) -> Self {
        BlockId((chunk as u32) << 16 | slot as u32)
    }

    #[inline]
    pub(crate) fn chunk(self) -> usize {
        (self.0 >> 16) as usize
    }

    #[inline]
    pub(crate) fn slot(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

/// An interned placement set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct SetId(pub(crate) u32);

impl SetId {
    /// The set without placements; free slots have it.
    pub(crate) const EMPTY: SetId = SetId(0);
}
