//! The prefix scan: how many leading blocks of a prompt each worker can reuse.
//!
//! The scan sees a read view and a byte slice, and allocates nothing once its
//! scratch is warm. It rests on two observations.
//!
//! **A chain lies in consecutive slots.** The first block is found through the
//! table. From then on the scan *guesses* that the next block stands in the next
//! slot. The arena knows where the run of equal placement sets ends, so a whole
//! run is compared with the request's bytes at once, as `memcmp` does, with no
//! look-up and no branch per block. Where the guess fails the table is asked:
//!
//! ```text
//! block = table[hash 0]
//! loop:
//!     run  = blocks from `block` on with one set
//!     next = the block of the first hash after the run: guess, else table
//!     same = common prefix of the run and the request
//!     if same < run: next = table[first hash that differs]
//!     if the set of `next` is another one: apply the rules to it
//!     block = next
//! ```
//!
//! `next` is wanted before the run is compared so that its cache misses pass
//! while the comparison runs. The guess is a hint: every block is checked by its
//! hash, so any layout of slots gives the same answer.
//!
//! **Nothing changes within a run but its length.** The rules look at runs, and
//! at 64 workers at once: a placement set is a few words of bits, and what a set
//! says of a worker under its rule, whether its prefix grows over these blocks,
//! whether it has SWA or Mamba there, are three words made from them by and, or
//! and not. A worker costs time only where one of its bits changes. That is why
//! a run held by 256 workers costs four words, and a set that differs from the
//! one before by one worker costs four words and that worker. See [`rules`].
//!
//! The scan stops where the answer is settled: nobody's prefix grows any more
//! and no worker without a spec may still fail closed.

pub mod lookup;
#[doc(hidden)]
pub mod naive;
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
/// so that a run that leaves the request early is not compared to its end.
const COMPARED_AT_ONCE: usize = 256;

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

fn scan(view: &ReadView, hashes: &[[u8; 8]], candidates: &mut Candidates) -> usize {
    let Some(first) = hashes.first() else { return 0 };
    let Some(mut block) = find(view, *first) else { return 1 };
    let mut set = view.set(block);
    if !candidates.begin(view, view.entries(set)) {
        return 1;
    }
    let mut at = 0;
    let mut tokens = 0;
    loop {
        let run = view.run(block).min(hashes.len() - at);
        let ahead =
            hashes.get(at + run).and_then(|hash| follow(view, Stretch { first: block, blocks: run }, *hash));
        let same = common(view.hashes_from(block), &hashes[at..at + run]);
        at += same;
        if candidates.weigh_tokens() {
            tokens += view.tokens_of(Stretch { first: block, blocks: same });
        }
        let mut next = if same == run { ahead } else { find(view, hashes[at]) };
        // Past a gap only workers that may fail closed are still of interest.
        while at < hashes.len() {
            let new = next.map_or(SetId::EMPTY, |block| view.set(block));
            if new != set {
                set = new;
                if !candidates.step(view, view.entries(set), at, tokens) {
                    return at + 1;
                }
            }
            if next.is_some() {
                break;
            }
            at += 1;
            next = hashes.get(at).and_then(|hash| find(view, *hash));
        }
        match next {
            Some(next) if at < hashes.len() => block = next,
            _ => break,
        }
    }
    candidates.end(view, at, tokens);
    at
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

/// Length of the common prefix of the hash column and the request, which is the shorter one.
#[inline]
fn common(column: &[[u8; 8]], request: &[[u8; 8]]) -> usize {
    let column = &column[..request.len()];
    let mut at = 0;
    while at < request.len() {
        let to = request.len().min(at + COMPARED_AT_ONCE);
        // As bytes, so that the comparison is one call of `memcmp`.
        if column[at..to].as_flattened() != request[at..to].as_flattened() {
            let differs = |(ours, theirs): (&[u8; 8], &[u8; 8])| ours != theirs;
            let place = column[at..to].iter().zip(&request[at..to]).position(differs);
            return at + place.unwrap_or(to - at);
        }
        at = to;
    }
    at
}
