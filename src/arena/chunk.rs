//! One chunk: columns and bitmaps of 65,536 slots that are kept in step.
//!
//! What the columns are for is told in [`super::blocks`]; this file holds what
//! must be true within one chunk. It must not know of other chunks or the table.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use super::bits::{self, Bits, WORDS};
use super::blocks::CHUNK_SLOTS;
use super::departures::Sections;
use super::ids::{BlockId, SetId};

/// Links of 64 slots: one for every 16.
const LINKS: usize = 4;

/// What a reader wants to know of 64 slots.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Marks {
    pub(super) edge: u64,
    pub(super) start: u64,
    links: [AtomicU32; LINKS],
}

const _: () = assert!(size_of::<Marks>() == 32, "the marks of a slot are in one cache line");

impl Marks {
    /// Where a chain went on that left its lane at `slot`, one of these; it may be anywhere by now.
    #[inline]
    pub(super) fn link(&self, slot: usize) -> Option<BlockId> {
        self.links[slot % 64 / 16].load(Relaxed).checked_sub(1).map(BlockId)
    }

    pub(super) fn put_link(&self, slot: usize, block: BlockId) {
        self.links[slot % 64 / 16].store(block.0 + 1, Relaxed);
    }

    pub(super) fn clear_link(&mut self, slot: usize) {
        *self.links[slot % 64 / 16].get_mut() = 0;
    }
}

/// The token counts of a chunk's blocks.
#[derive(Debug)]
pub(super) enum Tokens {
    /// All blocks of the chunk have this count: engines use one block size.
    Same(u32),
    /// One count per slot.
    Each(Box<[u32; CHUNK_SLOTS]>),
}

/// One chunk of columns.
///
/// Invariants: a slot's set is [`SetId::EMPTY`] exactly where its `used` bit is
/// clear; `ghosts` bits are set only where `used` bits are clear; an `edge` bit
/// is set exactly where the set differs from the left neighbour's, the first
/// slot's neighbour being empty; a list of departures says what sets and edges do.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) hashes: Box<[[u8; 8]; CHUNK_SLOTS]>,
    pub(super) sets: Box<[SetId; CHUNK_SLOTS]>,
    pub(super) tokens: Tokens,
    pub(super) marks: Box<[Marks; WORDS]>,
    pub(super) used: Box<Bits>,
    pub(super) ghosts: Box<Bits>,
    pub(super) sections: Sections,
    pub(super) live: usize,
    pub(super) remembered: usize,
}

fn column<T: Copy, const N: usize>(value: T) -> Box<[T; N]> {
    vec![value; N].into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!("the length is N"))
}

fn marks() -> Box<[Marks; WORDS]> {
    let marks: Box<[Marks]> = (0..WORDS).map(|_| Marks::default()).collect();
    marks.try_into().unwrap_or_else(|_| unreachable!("the length is WORDS"))
}

impl Chunk {
    pub(super) fn new() -> Self {
        Chunk {
            hashes: column([0; 8]),
            sets: column(SetId::EMPTY),
            tokens: Tokens::Same(0),
            marks: marks(),
            used: column(0),
            ghosts: column(0),
            sections: Sections::default(),
            live: 0,
            remembered: 0,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let tokens = match &self.tokens {
            Tokens::Same(_) => 0,
            Tokens::Each(_) => CHUNK_SLOTS * size_of::<u32>(),
        };
        CHUNK_SLOTS * (size_of::<[u8; 8]>() + size_of::<SetId>())
            + WORDS * (size_of::<Marks>() + 2 * 8)
            + tokens
            + self.sections.bytes()
    }

    /// Writes the tokens of `blocks` blocks from `slot` on, which are in use.
    ///
    /// `tokens` is empty, all unknown, or has one count per block. An unknown
    /// count is written for a new block and erases nothing of an old one.
    #[inline]
    pub(super) fn put_tokens(&mut self, slot: usize, blocks: usize, tokens: &[u32], new: bool) {
        let fits = |same| match tokens {
            [] => !new || same == 0,
            _ => tokens.iter().all(|tokens| *tokens == same || !new && *tokens == 0),
        };
        if !matches!(self.tokens, Tokens::Same(same) if fits(same)) {
            self.write_tokens(slot, blocks, tokens, new);
        }
    }

    /// The same where not all of the chunk's blocks have one count that stays.
    #[inline(never)]
    fn write_tokens(&mut self, slot: usize, blocks: usize, tokens: &[u32], new: bool) {
        let written = |tokens: u32| new || tokens != 0;
        if let Tokens::Same(same) = self.tokens {
            let first = tokens.first().copied().unwrap_or(0);
            if self.live == blocks && written(first) && tokens.iter().all(|tokens| *tokens == first) {
                self.tokens = Tokens::Same(first);
                return;
            }
            self.tokens = Tokens::Each(column(same));
        }
        if let Tokens::Each(each) = &mut self.tokens {
            let each = &mut each[slot..slot + blocks];
            if tokens.is_empty() && new {
                each.fill(0);
            }
            for (old, tokens) in each.iter_mut().zip(tokens) {
                if written(*tokens) {
                    *old = *tokens;
                }
            }
        }
    }

    /// The first edge and the first start of a stretch of the slots `from..to`: the start is `to` if there is
    /// none, and the edge is the start if there is none before it.
    // Always, as part of `Lane::new`.
    #[inline(always)]
    pub(super) fn next_edge_and_start(&self, from: usize, to: usize) -> (usize, usize) {
        if from >= to {
            return (to, to);
        }
        let mut number = from / 64;
        let first = |bits: u64| bits & (!0 << (from % 64));
        let (mut edges, mut starts) = (first(self.marks[number].edge), first(self.marks[number].start));
        while edges | starts == 0 {
            number += 1;
            if number * 64 >= to {
                return (to, to);
            }
            (edges, starts) = (self.marks[number].edge, self.marks[number].start);
        }
        // If there is no edge among these slots, this is behind their start.
        let edge = number * 64 + edges.trailing_zeros() as usize;
        let start = match starts {
            0 => bits::next(number * 64 + 64, to, |word| self.marks[word].start),
            _ => to.min(number * 64 + starts.trailing_zeros() as usize),
        };
        (edge.min(start), start)
    }

    pub(super) fn clear_starts(&mut self, from: usize, to: usize) {
        for (word, mask) in bits::masks(from, to) {
            self.marks[word].start &= !mask;
        }
    }

    pub(super) fn audit_slot(&self, block: BlockId) -> Result<(), String> {
        let slot = block.slot();
        let used = bits::get(&self.used, slot);
        if used == (self.sets[slot] == SetId::EMPTY) {
            return Err(format!("I2: {block:?} is in use: {used}, but has {:?}", self.sets[slot]));
        }
        if used && bits::get(&self.ghosts, slot) {
            return Err(format!("I2: {block:?} is in use and a ghost"));
        }
        let left = if slot == 0 { SetId::EMPTY } else { self.sets[slot - 1] };
        if (self.marks[slot / 64].edge >> (slot % 64) & 1 == 1) != (self.sets[slot] != left) {
            return Err(format!("I3: {block:?} has a wrong edge"));
        }
        Ok(())
    }

    /// Mends what is known of edges where the sets of the slots `from..to` have changed, all to one.
    #[inline]
    pub(super) fn mend_edges(&mut self, from: usize, to: usize) {
        self.mend_edge(from);
        self.mend_edge(to);
        self.forget_departures(from, to);
    }

    /// Sets the edge bit of `slot` as its set and its left neighbour's say.
    #[inline]
    fn mend_edge(&mut self, slot: usize) {
        if slot >= CHUNK_SLOTS {
            return;
        }
        let left = if slot == 0 { SetId::EMPTY } else { self.sets[slot - 1] };
        bits::put(&mut self.marks[slot / 64].edge, slot, self.sets[slot] != left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_edge_lies_before_the_next_start() {
        let slots = [1, 2, 63, 64, 65, 127, 130, 191, 192, 300, CHUNK_SLOTS - 1];
        for (edge, start) in slots.into_iter().flat_map(|edge| slots.map(|start| (edge, start))) {
            let mut chunk = Chunk::new();
            chunk.marks[edge / 64].edge = 1 << (edge % 64);
            chunk.marks[start / 64].start = 1 << (start % 64);
            for from in [1, 2, 64, 66, 128, 192, 193] {
                for to in
                    [from, from + 1, 192, 193, 300, 301, CHUNK_SLOTS].into_iter().filter(|to| *to >= from)
                {
                    let first = |slot| if (from..to).contains(&slot) { slot } else { to };
                    let expected = (first(edge).min(first(start)), first(start));
                    let found = chunk.next_edge_and_start(from, to);
                    assert_eq!(found, expected, "of {from}..{to}, edge {edge}, start {start}");
                }
            }
        }
    }
}
