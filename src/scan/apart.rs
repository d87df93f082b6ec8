//! Blocks that lie apart.
//!
//! An engine that decodes stores one block at a time, in turn with those of all other
//! requests that it serves, and no report says what its block follows. So the blocks of an
//! answer lie in as many places as it has blocks. Lanes are no help there: each
//! would be looked for only once the one before has been walked, and each look-up waits
//! for memory two or three times.
//!
//! After a few short lanes a scan therefore goes on block by block, with the look-ups of the next
//! blocks under way meanwhile, until it meets neighbours again. What is unknown is passed
//! the same way: where a worker may still fail closed, all of it is looked at.

use crate::arena::{BlockId, Lane, Located, ReadView, SetId, TOGETHER};

use super::rules::Candidates;
use super::{Position, enter};

/// Fewer blocks than this in a row are found faster one by one.
pub(super) const SHORT: usize = 8;

/// Blocks looked up together at first, and twice as many each time: it may be few that lie apart.
const FEW: usize = 4;

/// So many blocks that lie beside none of the prompt are worth having them laid side by side.
const WORTH_GATHERING: usize = 16;

/// How a scan goes on.
pub(super) enum Onward<'a> {
    /// With a lane, whose first block follows those passed.
    Along(Lane<'a>),
    /// Not at all: the answer is settled at the position.
    Settled,
    /// Not at all: the request ends here.
    End,
}

/// Blocks that lie beside none of the prompt.
#[derive(Default)]
struct Alone {
    blocks: usize,
    /// The set of the last of them.
    set: SetId,
}

/// Takes the candidates along blocks that lie apart, and over unknown ones.
///
/// Those before, from position `from` on, have been found to lie apart as well.
#[inline(never)]
pub(super) fn walk_apart<'a>(
    view: &'a ReadView,
    hashes: &[[u8; 8]],
    from: usize,
    candidates: &mut Candidates,
    position: &mut Position,
) -> Onward<'a> {
    let mut alone = Alone::default();
    let onward = walk_on(view, hashes, candidates, position, &mut alone);
    if alone.blocks >= WORTH_GATHERING {
        view.wish(&hashes[from..position.at], alone.set);
    }
    onward
}

fn walk_on<'a>(
    view: &'a ReadView,
    hashes: &[[u8; 8]],
    candidates: &mut Candidates,
    position: &mut Position,
    alone: &mut Alone,
) -> Onward<'a> {
    let mut located = [Located::NOWHERE; TOGETHER];
    let (mut together, mut before, mut neighbours) = (FEW, BlockId(u32::MAX), 0);
    loop {
        let rest = &hashes[position.at..];
        let some = &rest[..rest.len().min(together)];
        if some.is_empty() {
            return Onward::End;
        }
        together = TOGETHER.min(2 * together);
        view.locate_all(some, &mut located);
        for Located { block, set } in &located[..some.len()] {
            if !enter(view, *set, candidates, position) {
                return Onward::Settled;
            }
            neighbours = if block.0 == before.0.wrapping_add(1) { neighbours + 1 } else { 0 };
            before = *block;
            if *set != SetId::EMPTY {
                if neighbours == 0 {
                    *alone = Alone { blocks: alone.blocks + 1, set: *set };
                }
                if neighbours >= SHORT
                    && let Some(lane) = view.lane_from(*block, hashes.len() - position.at)
                {
                    return Onward::Along(lane);
                }
                if candidates.weigh_tokens() {
                    position.tokens += u64::from(view.tokens(*block));
                }
            }
            position.at += 1;
        }
    }
}
