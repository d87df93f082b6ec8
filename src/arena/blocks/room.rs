//! Where new blocks go.
//!
//! Slots are given away by sweeping an open chunk for free ranges. Ranges shorter than the
//! stretch are passed over for a while if a longer one may follow. Stretches of fewer than eight blocks
//! go to another open chunk than longer ones, the emptiest: blocks that come alone leave
//! alone, and the gaps that they leave are filled by their like, while room side by side is
//! kept for stretches. What is looked for there is the chunk with most of it, and a new one
//! is opened when no more than an eighth of all slots is free, which bounds what fragmentation can cost
//! in bytes per block. A small index has one chunk for both.

use super::{Blocks, CHUNK_SLOTS, Stretch};
use crate::arena::bits;
use crate::arena::chunk::Chunk;
use crate::arena::ids::BlockId;

/// A chunk is swept for free slots once this share of it is free, and a new one is opened while no more than this
/// share of all is. Smaller costs fragmentation, larger costs bytes: an eighth is at most 3 bytes per block.
const REFILL_FREE_MIN: usize = CHUNK_SLOTS / 8;

/// Stretches of so many blocks are long, and go elsewhere than short ones.
pub(in crate::arena) const LONG: usize = 8;

/// In how many chunks room for long stretches is looked for: each costs some microseconds.
const ROOM_LOOKED_FOR: usize = 8;

/// A chunk is swept for long stretches once this part of it is free in groups of eight slots. Some of them are passed
/// over, so it is looked for once in some hundred blocks at the most.
const ROOM_SHARE: usize = 32;

/// How many free ranges that are too short for a stretch are passed over before
/// the longest of them is taken. Each costs a few nanoseconds.
const RANGES_TRIED: usize = 16;

/// A chunk being filled, and the slot up to which it has been swept.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    chunk: usize,
    swept: usize,
}

impl Blocks {
    /// Free slots right from `block` on, at most `most`.
    pub(crate) fn free_from(&self, block: BlockId, most: usize) -> usize {
        if self.scattered || block.slot() >= self.chunk_slots {
            return 0;
        }
        let (slot, used) = (block.slot(), &self.chunk(block).used);
        bits::next(slot, self.chunk_slots.min(slot + most), |word| used[word]) - slot
    }

    /// Free slots for up to `blocks` blocks, at least one, of a report of `all`; they may have ghosts.
    ///
    /// A chunk for long stretches has room side by side, one for short ones is the emptiest of the others.
    pub(crate) fn find_free(&mut self, blocks: usize, all: usize) -> Stretch {
        let long = all >= LONG;
        loop {
            if let Some(stretch) = self.sweep(long, blocks) {
                return stretch;
            }
            let number = if long { self.chunk_with_room() } else { self.emptiest(Some(self.long.chunk)) };
            let number = number.or_else(|| self.emptiest(None).filter(|_| !self.is_dense(0)));
            self.open_chunk(long, number);
        }
    }

    /// The same for blocks that are stored already: at least as many slots as make a long stretch, or for all of
    /// them; none if there is no such room and enough else is free. A chunk more than otherwise may be: the blocks
    /// of a small index can leave theirs for another one.
    pub(crate) fn find_room(&mut self, blocks: usize) -> Option<Stretch> {
        loop {
            if let Some(stretch) = self.sweep(true, blocks) {
                return (stretch.blocks >= blocks.min(LONG)).then_some(stretch);
            }
            let number = self.chunk_with_room();
            if self.scattered || number.is_none() && !self.is_dense(self.chunk_slots) {
                return None;
            }
            self.open_chunk(true, number);
        }
    }

    /// The next free range of an open chunk that is long enough, or the longest of a few.
    fn sweep(&mut self, long: bool, blocks: usize) -> Option<Stretch> {
        let blocks = if self.scattered { 1 } else { blocks };
        let cursor = if long { self.long } else { self.short };
        let chunk = self.chunks.get(cursor.chunk)?.as_ref()?;
        let used = &chunk.used;
        let mut from = cursor.swept;
        let mut best: Option<(usize, usize)> = None;
        for _ in 0..RANGES_TRIED {
            from = bits::next(from, self.chunk_slots, |word| !used[word]);
            if from == self.chunk_slots {
                break;
            }
            let to = bits::next(from, self.chunk_slots.min(from + blocks), |word| used[word]);
            if best.is_none_or(|(best_from, best_to)| to - from > best_to - best_from) {
                best = Some((from, to));
            }
            if to - from == blocks {
                break;
            }
            from = to;
        }
        let (from, to) = best?;
        let length = (to - from).min(blocks);
        let swept = from + length + usize::from(self.scattered);
        *(if long { &mut self.long } else { &mut self.short }) = Cursor { swept, ..cursor };
        Some(Stretch { first: BlockId::new(cursor.chunk, from), blocks: length })
    }

    /// Slots of a chunk that make it worth sweeping, if they are free.
    fn enough(&self) -> usize {
        (REFILL_FREE_MIN * self.chunk_slots / CHUNK_SLOTS).max(1)
    }

    /// The chunk with the fewest blocks, but for one, if enough of it is free.
    fn emptiest(&self, but: Option<usize>) -> Option<usize> {
        let most = self.chunk_slots - self.enough();
        let live = |number: usize| self.chunks[number].as_ref().map(|chunk| (chunk.live, number));
        let chunks = (0..self.chunks.len()).filter(|number| Some(*number) != but && !self.scattered);
        chunks.filter_map(live).filter(|(live, _)| *live <= most).min().map(|(_, number)| number)
    }

    /// Of the emptiest chunks, but for the one where short stretches go, the one with the most room for long
    /// ones, if it is worth sweeping.
    fn chunk_with_room(&self) -> Option<usize> {
        let live = |number: usize| Some((self.chunks[number].as_ref()?.live, number));
        let mut chunks: Vec<_> =
            (0..self.chunks.len()).filter(|number| *number != self.short.chunk).filter_map(live).collect();
        if chunks.len() > ROOM_LOOKED_FOR {
            chunks.select_nth_unstable(ROOM_LOOKED_FOR);
        }
        let words = self.chunk_slots / 64;
        let room =
            |chunk: &Chunk| chunk.used[..words].iter().map(|word| bits::zero_bytes(*word)).sum::<usize>();
        let with_room = chunks.iter().take(ROOM_LOOKED_FOR).filter_map(|(_, number)| {
            let bytes = room(self.chunks[*number].as_ref()?);
            (8 * bytes * ROOM_SHARE >= self.chunk_slots).then_some((bytes, *number))
        });
        with_room.max().map(|(_, number)| number).filter(|_| !self.scattered)
    }

    /// Whether so few slots of all are free, but for `spare` ones, that a new chunk is due.
    fn is_dense(&self, spare: usize) -> bool {
        let slots = self.chunks.iter().flatten().count() * self.chunk_slots;
        let free = (slots - self.live).saturating_sub(spare);
        free * CHUNK_SLOTS <= slots * REFILL_FREE_MIN
    }

    /// Opens a chunk for long stretches or short ones, a new one if none is given.
    fn open_chunk(&mut self, long: bool, number: Option<usize>) {
        let number = number.unwrap_or_else(|| {
            let number = self.chunks.iter().position(Option::is_none).unwrap_or(self.chunks.len());
            if number == self.chunks.len() {
                self.chunks.push(None);
            }
            self.chunks[number] = Some(Chunk::new());
            number
        });
        *(if long { &mut self.long } else { &mut self.short }) = Cursor { chunk: number, swept: 0 };
        self.opened = number;
    }
}
