//! The prefix scan: how many leading blocks of a prompt each worker can reuse.
//!
//! The scan sees a read view and a byte slice, and allocates nothing once its
//! scratch is warm. It rests on two observations.
//!
//! **A chain lies in consecutive slots.** The first block is found through the
//! table. From then on the scan *guesses* that the next block stands in the next
//! slot, and the arena marks where a stretch of slots was stored, beyond which
//! the guess is worth less. A whole stretch is compared with the request's bytes
//! as `memcmp` does, with no look-up and no branch per block; within it, marks
//! say where the placement set changes. Only at its end is the next hash looked
//! for, in the slot behind it, else by the table:
//!
//! ```text
//! block = table[hash 0]
//! loop:
//!     stretch = slots from `block` on to the next start of a stretch
//!     next    = block of the first hash after the stretch: guess, else table
//!     same    = common prefix of the stretch and the request
//!     for each run of one set within `same`: apply the rules to the run
//!     if same < stretch: next = table[first hash that differs]
//!     block = next
//! ```
//!
//! `next` is wanted before the stretch is compared so that its cache misses pass
//! while the comparison runs. The guess is a hint: every block is checked by its
//! hash, so any layout of slots gives the same answer.
//!
//! **Nothing changes within a run but its length.** The rules look at runs, and
//! at 64 workers at once: a placement set is a few words of bits, and what a set
//! says of a worker under its rule, whether its prefix grows over these blocks,
//! whether it has SWA or Mamba there, are three words made from them by and, or
//! and not. A worker costs time only where one of its bits changes. That is why
//! a run held by 256 workers costs four words, and a set that differs from the
//! one before by one worker costs four words and that worker. See `rules`.
//!
//! The scan stops where the answer is settled: nobody's prefix grows any more
//! and no worker without a spec may still fail closed.

pub mod lookup;
#[doc(hidden)]
pub mod naive;
mod ranking;
mod rules;

use crate::arena::{BlockId, PackedHashes, ReadView, SetId, Stretch, WorkerId};

use rules::Candidates;

/// How many leading blocks one worker can reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Who.
    pub worker: WorkerId,
    /// Leading blocks, at least 1.
    pub blocks: u32,
}

/// Working memory of [`prefix`], kept between calls so that warm scans allocate nothing.
#[derive(Debug, Default)]
pub struct PrefixScratch {
    candidates: Candidates,
}

impl PrefixScratch {
    /// The last scan's matches, longest first, equal ones by ascending worker.
    pub fn matches(&self) -> &[PrefixMatch] {
        self.candidates.matches()
    }
}

/// Hashes compared before looking for the one that differs: 2 KiB of each side,
/// and twice as many each time that all are equal, so that a run that leaves the
/// request early is not compared to its end.
const COMPARED_AT_FIRST: usize = 256;

/// Finds how many leading blocks of `hashes` each routable worker can reuse.
///
/// Leaves the matches in `scratch` and returns how many positions were looked
/// at: 0 of no hashes, 1 if nobody has the first, else up to the position at
/// which the answer was settled.
pub fn prefix(view: &ReadView, hashes: PackedHashes<'_>, scratch: &mut PrefixScratch) -> u32 {
    let candidates = &mut scratch.candidates;
    candidates.clear();
    let read = scan(view, hashes.as_bytes(), candidates);
    candidates.rank();
    u32::try_from(read).unwrap_or(u32::MAX)
}

/// How far a scan has come.
struct Position {
    /// Blocks of the request that have been looked at.
    at: usize,
    /// Tokens of these, counted only while a candidate's rule asks for them.
    tokens: u64,
    /// Placement set of the last of them.
    set: SetId,
}

/// What a walk along a stretch ended with.
enum Walk {
    /// It went through.
    Through,
    /// It met a free slot; the hash that stands there may live elsewhere.
    Free,
    /// The answer is settled.
    Settled,
}

fn scan(view: &ReadView, hashes: &[[u8; 8]], candidates: &mut Candidates) -> usize {
    let Some(first) = hashes.first() else { return 0 };
    let Some(mut block) = find(view, *first) else { return 1 };
    let set = view.set(block);
    let mut position = Position { at: 0, tokens: 0, set };
    if !candidates.begin(view, view.entries(set)) {
        return 1;
    }
    loop {
        let start = position.at;
        let stretch = view.stretch(block, hashes.len() - start);
        let after = hashes.get(start + stretch.blocks);
        let ahead = after.and_then(|hash| follow(view, stretch, *hash));
        match compare(view, stretch, hashes, candidates, &mut position) {
            Walk::Settled => return position.at + 1,
            Walk::Through | Walk::Free => {}
        }
        let mut next = if position.at == start + stretch.blocks {
            ahead
        } else {
            hashes.get(position.at).and_then(|hash| find(view, *hash))
        };
        // Past a gap only workers that may fail closed are still of interest.
        while next.is_none() && position.at < hashes.len() {
            if !enter(view, SetId::EMPTY, candidates, &mut position) {
                return position.at + 1;
            }
            position.at += 1;
            next = hashes.get(position.at).and_then(|hash| find(view, *hash));
        }
        match next {
            Some(next) => block = next,
            None => break,
        }
        if !enter(view, view.set(block), candidates, &mut position) {
            return position.at + 1;
        }
    }
    candidates.end(view, position.at, position.tokens);
    position.at
}

/// Compares a stretch with the request from the current position on and walks along what is equal.
#[inline]
fn compare(
    view: &ReadView,
    stretch: Stretch,
    hashes: &[[u8; 8]],
    candidates: &mut Candidates,
    position: &mut Position,
) -> Walk {
    let column = &view.hashes_from(stretch.first)[..stretch.blocks];
    let hashes = &hashes[position.at..position.at + stretch.blocks];
    let mut done = 0;
    let mut piece = COMPARED_AT_FIRST;
    while done < stretch.blocks {
        let end = stretch.blocks.min(done + piece);
        let same = common(&column[done..end], &hashes[done..end]);
        let first = BlockId(stretch.first.0 + done as u32);
        let walk = walk(view, Stretch { first, blocks: same }, candidates, position);
        if done + same < end || !matches!(walk, Walk::Through) {
            return walk;
        }
        piece += end - done;
        done = end;
    }
    Walk::Through
}

/// Takes the candidates along a stretch that equals the request, run by run.
#[inline]
fn walk(view: &ReadView, stretch: Stretch, candidates: &mut Candidates, position: &mut Position) -> Walk {
    let sets = view.sets_of(stretch);
    let mut edges = view.edges(stretch);
    let mut place = 0;
    while place < sets.len() {
        let set = sets[place];
        if set == SetId::EMPTY {
            return Walk::Free;
        }
        if !enter(view, set, candidates, position) {
            return Walk::Settled;
        }
        let end = edges.next().unwrap_or(sets.len());
        if candidates.weigh_tokens() {
            let first = BlockId(stretch.first.0 + place as u32);
            position.tokens += view.tokens_of(Stretch { first, blocks: end - place });
        }
        position.at += end - place;
        place = end;
    }
    Walk::Through
}

/// Enters blocks with this set; says whether anything from here on can change the answer.
#[inline]
fn enter(view: &ReadView, set: SetId, candidates: &mut Candidates, position: &mut Position) -> bool {
    if set == position.set {
        return true;
    }
    position.set = set;
    candidates.step(view, view.entries(set), position.at, position.tokens)
}

fn find(view: &ReadView, hash: [u8; 8]) -> Option<BlockId> {
    view.find(i64::from_le_bytes(hash))
}

/// The block with this hash: right after `stretch` if it stands there, else by the table.
#[inline]
fn follow(view: &ReadView, stretch: Stretch, hash: [u8; 8]) -> Option<BlockId> {
    view.after(stretch)
        .filter(|block| view.hashes_from(*block)[0] == hash && view.set(*block) != SetId::EMPTY)
        .or_else(|| find(view, hash))
}

/// Length of the common prefix of two lists of hashes of the same length.
#[inline]
fn common(column: &[[u8; 8]], request: &[[u8; 8]]) -> usize {
    // As bytes, so that the comparison is one call of `memcmp`.
    if column.as_flattened() == request.as_flattened() {
        return column.len();
    }
    column.iter().zip(request).take_while(|(ours, theirs)| ours == theirs).count()
}
