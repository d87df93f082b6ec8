//! The prefix scan: how many leading blocks of a prompt each worker can reuse.
//!
//! The scan sees a read view and a byte slice, and allocates nothing once its
//! scratch is warm, but for lists of departures where a change dropped them. It rests on two observations.
//!
//! **A chain lies in consecutive slots.** The first block is found through the
//! table. From then on the scan *guesses* that the next block stands in the next
//! slot, and the arena marks where a stretch of slots was stored, beyond which
//! the guess is worth less. Such a *lane* is compared with the request's bytes
//! as `memcmp` does, with no look-up and no branch per block; within it, marks
//! say where the placement set changes. Only at its end is the next hash looked
//! for: where the last chain went on that came this way, else in the slot behind
//! it, else by the table:
//!
//! ```text
//! lane = of the block table[hash 0]
//! loop:
//!     ahead = lane of the first hash after this lane, if it is where the link says or behind
//!     equal = common prefix of the lane and the request
//!     for each run of one set within `equal`: apply the rules to the run
//!     lane  = ahead if equal = lane, else lane of table[first hash that differs]
//! ```
//!
//! `ahead` is looked for before the lane is compared, and what will be read after it is
//! fetched then, so that cache misses pass while the comparison runs: the lines that the link of
//! `ahead` leads to, or the bucket of the hash where no link leads on. Both guesses are hints: every
//! block is checked by its hash, so any layout gives the same answer. Where lanes turn out to be short,
//! blocks are looked up many at a time instead; see `apart`.
//!
//! **Nothing changes within a run but its length.** The rules look at runs, and
//! at 64 workers at once: a placement set is a few words of bits, and what a set
//! says of a worker under its rule, whether its prefix grows over these blocks,
//! whether it has SWA or Mamba there, are three words made from them by and, or
//! and not. A worker costs time only where one of its bits changes. That is why
//! a run held by 256 workers costs four words. Where a chain's holders leave it one after
//! another, the arena lists who leaves where, and a scan need not look at the sets between.
//! See `rules` and the arena's `departures`.
//!
//! The scan stops where the answer is settled: nobody's prefix grows any more
//! and no worker without a spec may still fail closed.

mod apart;
pub mod lookup;
#[doc(hidden)]
pub mod naive;
mod ranking;
mod rules;

use crate::arena::{Lane, PackedHashes, ReadView, SetId, WorkerId};

use apart::{Onward, SHORT, walk_apart};
use rules::{Candidates, Passed};

/// How many leading blocks one worker can reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Who.
    pub worker: WorkerId,
    /// Leading blocks, at least 1.
    pub blocks: u32,
}

/// Working memory of [`prefix`], kept between calls so that warm scans allocate nothing of their own.
#[derive(Debug, Default)]
pub struct PrefixScratch {
    candidates: Candidates,
    /// Scans so far.
    scans: u32,
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

/// After so many short lanes in a row at whose ends no guess held, blocks are taken to lie apart.
const SHORTS_APART: usize = 2;

/// One of so many scans replaces links that lead to other chains than its own.
const REPLACES: u32 = 16;

/// Finds how many leading blocks of `hashes` each routable worker can reuse.
///
/// Leaves the matches in `scratch` and returns how many positions were looked
/// at: 0 of no hashes, 1 if nobody has the first, else up to the position at
/// which the answer was settled.
pub fn prefix(view: &ReadView, hashes: PackedHashes<'_>, scratch: &mut PrefixScratch) -> u32 {
    let PrefixScratch { candidates, scans } = scratch;
    candidates.clear();
    *scans = scans.wrapping_add(1);
    let read = scan(view, hashes.as_bytes(), candidates, scans.is_multiple_of(REPLACES));
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

/// Scans `hashes`; `replace` says that links to other chains are replaced.
fn scan(view: &ReadView, hashes: &[[u8; 8]], candidates: &mut Candidates, replace: bool) -> usize {
    let Some(first) = hashes.first() else { return 0 };
    let Some(mut lane) = find(view, *first, hashes.len()) else { return 1 };
    let set = lane.set();
    let mut position = Position { at: 0, tokens: 0, set };
    let (mut shorts, mut apart_from) = (0, 0);
    if !candidates.begin(view, view.entries(set)) {
        return 1;
    }
    loop {
        let (request, rest) = hashes[position.at..].split_at(lane.len());
        let ahead = rest.first().and_then(|hash| view.follow(&lane, *hash, rest.len()));
        if let Some(ahead) = &ahead
            && let Some(hash) = rest.get(ahead.len())
        {
            view.fetch_next(ahead, *hash);
        }
        let (start, end) = (position.at, position.at + lane.len());
        let equal = common(lane.hashes(), request);
        if !walk(view, &lane, equal, candidates, &mut position) {
            return position.at + 1;
        }
        if let Some(ahead) = ahead.filter(|_| position.at == end) {
            (lane, shorts, apart_from) = (ahead, 0, position.at);
            continue;
        }
        if position.at - start < SHORT {
            shorts += 1;
        } else {
            (shorts, apart_from) = (0, position.at);
        }
        if shorts < SHORTS_APART {
            let Some(hash) = hashes.get(position.at) else { break };
            if let Some(next) = find(view, *hash, hashes.len() - position.at) {
                if position.at == end {
                    view.link(&lane, next.first(), replace);
                }
                lane = next;
                continue;
            }
            // Past a gap only workers that may fail closed are still of interest.
            if !enter(view, SetId::EMPTY, candidates, &mut position) {
                return position.at + 1;
            }
            position.at += 1;
        }
        match walk_apart(view, hashes, apart_from, candidates, &mut position) {
            Onward::Along(next) => (lane, apart_from) = (next, position.at),
            Onward::Settled => return position.at + 1,
            Onward::End => break,
        }
    }
    candidates.end(view, position.at, position.tokens);
    position.at
}

/// Takes the candidates along the first `equal` places of a lane, which equal the request.
///
/// Stops at a free slot, as the hash that stands there may live elsewhere, and where
/// the answer is settled; then it returns `false`.
#[inline]
fn walk(
    view: &ReadView,
    lane: &Lane<'_>,
    equal: usize,
    candidates: &mut Candidates,
    position: &mut Position,
) -> bool {
    if !enter(view, lane.set(), candidates, position) {
        return false;
    }
    if lane.even() < equal {
        return walk_runs(view, lane, equal, candidates, position);
    }
    pass(lane, 0, equal, candidates, position);
    true
}

/// The same for a lane whose set changes within these places; its first set is entered.
// A call would put lane and position into memory, where copies of them wait for stores.
#[inline]
fn walk_runs(
    view: &ReadView,
    lane: &Lane<'_>,
    equal: usize,
    candidates: &mut Candidates,
    position: &mut Position,
) -> bool {
    let sets = &lane.sets()[..equal];
    let (mut place, mut from) = (0, lane.even());
    loop {
        let passed = Passed { place, at: position.at, tokens: position.tokens };
        let Some(edge) = candidates.pass_edges(view, lane.slots(), from, equal, passed) else { break };
        pass(lane, place, edge, candidates, position);
        position.set = sets[edge - 1];
        (place, from) = (edge, edge + 1);
        let set = sets[edge];
        if set == SetId::EMPTY {
            return true;
        }
        if !enter(view, set, candidates, position) {
            return false;
        }
    }
    pass(lane, place, equal, candidates, position);
    position.set = sets[equal - 1];
    true
}

/// Passes the blocks of a lane from `place` to before `to`, all of one set.
#[inline]
fn pass(lane: &Lane<'_>, place: usize, to: usize, candidates: &Candidates, position: &mut Position) {
    if candidates.weigh_tokens() {
        position.tokens += lane.slots().tokens(place, to);
    }
    position.at += to - place;
}

/// Enters blocks with this set; says whether anything from here on can change the answer.
#[inline]
fn enter(view: &ReadView, set: SetId, candidates: &mut Candidates, position: &mut Position) -> bool {
    if set == position.set {
        return true;
    }
    position.set = set;
    candidates.step(view, set, position.at, position.tokens)
}

/// The lane of at most `most` slots that begins with the block of this hash.
#[inline(always)]
fn find(view: &ReadView, hash: [u8; 8], most: usize) -> Option<Lane<'_>> {
    view.lane(i64::from_le_bytes(hash), most)
}

/// Length of the common prefix of two lists of hashes of the same length.
#[inline]
fn common(column: &[[u8; 8]], request: &[[u8; 8]]) -> usize {
    // As bytes, so that the comparison is one call of `memcmp`.
    if column.len() <= COMPARED_AT_FIRST && column.as_flattened() == request.as_flattened() {
        return column.len();
    }
    common_by_pieces(column, request)
}

#[inline(never)]
fn common_by_pieces(column: &[[u8; 8]], request: &[[u8; 8]]) -> usize {
    let mut done = 0;
    let mut piece = COMPARED_AT_FIRST;
    loop {
        let end = column.len().min(done + piece);
        let (ours, theirs) = (&column[done..end], &request[done..end]);
        if ours.as_flattened() != theirs.as_flattened() {
            return done + ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
        }
        if end == column.len() {
            return end;
        }
        piece += end - done;
        done = end;
    }
}
