//! What is sent: the calls of each mode by their number, seeded, and their right answers.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits::HASHES_PER_CALL_MAX;
use crate::pb::{
    ApplyExternalKvBatchRequest, ExternalKvAction, ExternalKvActionType, ExternalKvPrefixMatch,
    MatchExternalKvPrefixRequest, MatchExternalKvPrefixResponse, TierType,
};
use bytes::Bytes;
use prost::Message;

/// Route of applies.
pub(super) const APPLY: &str = "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch";
/// Route of prefix queries.
pub(super) const PREFIX: &str = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix";

/// Blocks of one report of the fill and mixed modes: a turn of a conversation.
const TURN: usize = 32;

/// Which calls are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Prefix queries.
    Query,
    /// Reports of new blocks.
    Fill,
    /// Nine queries to one apply, which reports a turn or takes it back.
    Mixed,
    /// The same, and one call of a hundred is a long query.
    LongScan,
}

/// Kinds of calls, each with percentiles of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Query,
    Apply,
    Long,
}

impl Kind {
    pub(super) const ALL: [(Kind, &'static str); 3] =
        [(Kind::Query, "query"), (Kind::Apply, "apply"), (Kind::Long, "long")];
}

/// One call, ready to send.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) body: Bytes,
}

/// Sizes of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) prompts: usize,
    pub(super) blocks: usize,
    pub(super) holders: usize,
    pub(super) long_blocks: usize,
}

/// All calls of a run.
#[derive(Debug)]
pub(super) struct Plan {
    mode: Mode,
    sizes: Sizes,
    prompts: Vec<Bytes>,
    long: Bytes,
    /// Length of a checked answer to a query, and to a long one; 0 until there was one.
    answers: [AtomicUsize; 2],
}

impl Plan {
    pub(super) fn new(mode: Mode, sizes: Sizes) -> Self {
        let query = |hashes| MatchExternalKvPrefixRequest { hashes, max_blocks: 0 }.encode_to_vec().into();
        let prompts = match mode {
            Mode::Fill => Vec::new(),
            _ => (0..sizes.prompts).map(|prompt| query(chain(prompt, sizes.blocks))).collect(),
        };
        let long = match mode {
            Mode::LongScan => query(chain(sizes.prompts, sizes.long_blocks)),
            _ => Bytes::new(),
        };
        Plan { mode, sizes, prompts, long, answers: Default::default() }
    }

    /// The applies that store what queries ask for.
    pub(super) fn preparation(&self) -> impl Iterator<Item = Bytes> + '_ {
        let prompts = self.prompts.len();
        let asked = (0..prompts).map(|prompt| (prompt, self.sizes.blocks));
        let long = (self.mode == Mode::LongScan).then_some((prompts, self.sizes.long_blocks));
        asked.chain(long).flat_map(|(prompt, blocks)| {
            let chain = chain(prompt, blocks);
            let parts: Vec<Vec<i64>> = chain.chunks(HASHES_PER_CALL_MAX).map(<[i64]>::to_vec).collect();
            (0..self.sizes.holders).flat_map(move |worker| {
                parts
                    .clone()
                    .into_iter()
                    .map(move |part| apply(worker, ExternalKvActionType::ActionReport, part))
            })
        })
    }

    /// How many applies that is.
    pub(super) fn preparation_calls(&self) -> usize {
        let parts = |blocks: usize| blocks.div_ceil(HASHES_PER_CALL_MAX);
        let long = if self.mode == Mode::LongScan { parts(self.sizes.long_blocks) } else { 0 };
        (self.prompts.len() * parts(self.sizes.blocks) + long) * self.sizes.holders
    }

    /// Call number `number`.
    pub(super) fn call(&self, number: usize) -> Call {
        match self.mode {
            Mode::Fill => self.turn(number, ExternalKvActionType::ActionReport),
            Mode::LongScan if number % 100 == 50 => Call { kind: Kind::Long, body: self.long.clone() },
            Mode::Mixed | Mode::LongScan if number.is_multiple_of(10) => {
                let place = number / 10;
                let action = match place % 2 {
                    0 => ExternalKvActionType::ActionReport,
                    _ => ExternalKvActionType::ActionRevoke,
                };
                self.turn(place / 2, action)
            }
            _ => Call { kind: Kind::Query, body: self.prompts[number % self.prompts.len()].clone() },
        }
    }

    fn turn(&self, number: usize, action: ExternalKvActionType) -> Call {
        let hashes = seeded(!(number as u64) << 16, TURN);
        Call { kind: Kind::Apply, body: apply(number % self.sizes.holders, action, hashes) }
    }

    /// Whether `answer` is the right one to a call of this kind.
    ///
    /// The first answer is read. Later ones have to be as long: all prompts have
    /// the same holders and lengths, and reading all would take the machine from
    /// the server.
    pub(super) fn is_right(&self, kind: Kind, answer: &[u8]) -> bool {
        let (place, blocks) = match kind {
            Kind::Apply => return true,
            Kind::Query => (0, self.sizes.blocks),
            Kind::Long => (1, self.sizes.long_blocks),
        };
        // Relaxed: the length is all that is told.
        match self.answers[place].load(Ordering::Relaxed) {
            0 => {
                let right = MatchExternalKvPrefixResponse::decode(answer).is_ok_and(|answer| {
                    answer.matches.len() == self.sizes.holders
                        && answer.matches.iter().all(|row| row.matched_prefix_blocks as usize == blocks)
                        && answer.best_prefix_blocks as usize == blocks
                });
                if right {
                    self.answers[place].store(answer.len(), Ordering::Relaxed);
                }
                right
            }
            length => length == answer.len(),
        }
    }
}

/// The answer to a query for a prompt of this size.
pub(super) fn answer(blocks: usize, holders: usize) -> Bytes {
    let blocks = blocks as u32;
    let row = |worker| ExternalKvPrefixMatch {
        worker_address: worker_address(worker),
        matched_prefix_blocks: blocks,
        worker_id: worker_name(worker),
    };
    MatchExternalKvPrefixResponse {
        matches: (0..holders).map(row).collect(),
        best_prefix_blocks: blocks,
        blocks_read: blocks,
    }
    .encode_to_vec()
    .into()
}

fn chain(prompt: usize, blocks: usize) -> Vec<i64> {
    seeded((prompt as u64) << 32, blocks)
}

fn apply(worker: usize, action: ExternalKvActionType, hashes: Vec<i64>) -> Bytes {
    let block_sizes = match action {
        ExternalKvActionType::ActionReport => vec![16; hashes.len()],
        _ => Vec::new(),
    };
    ApplyExternalKvBatchRequest {
        worker_id: worker_name(worker),
        worker_address: worker_address(worker),
        actions: vec![ExternalKvAction {
            r#type: action.into(),
            tier: TierType::TierHbm.into(),
            hashes,
            component_masks: Vec::new(),
            block_sizes,
        }],
        ..Default::default()
    }
    .encode_to_vec()
    .into()
}

/// Hashes from a counter through a mix: random to look at, the same in every run.
pub(super) fn seeded(start: u64, blocks: usize) -> Vec<i64> {
    let mut counter = start;
    let hashes = (0..blocks).map(|_| {
        counter = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = counter;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)).cast_signed()
    });
    hashes.collect()
}

fn worker_name(worker: usize) -> String {
    format!("worker-{worker}")
}

fn worker_address(worker: usize) -> String {
    format!("http://10.0.{}.{}:30000", worker / 256, worker % 256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_applies_is_told_right() {
        let check = |mode, prompts, blocks, long_blocks| {
            let plan = Plan::new(mode, Sizes { prompts, blocks, holders: 3, long_blocks });
            assert_eq!(plan.preparation_calls(), plan.preparation().count(), "{mode:?}");
        };
        check(Mode::Query, 4, 10, 1);
        check(Mode::Mixed, 2, HASHES_PER_CALL_MAX + 1, 1);
        check(Mode::LongScan, 2, 10, 2 * HASHES_PER_CALL_MAX);
        check(Mode::Fill, 2, 10, 1);
    }

    #[test]
    fn an_answer_is_right_if_it_is_of_every_holder_and_the_whole_prompt() {
        let plan = Plan::new(Mode::Query, Sizes { prompts: 1, blocks: 10, holders: 3, long_blocks: 1 });
        assert!(!plan.is_right(Kind::Query, &answer(9, 3)) && !plan.is_right(Kind::Query, &answer(10, 2)));
        assert!(plan.is_right(Kind::Query, &answer(10, 3)), "and from then on by its length alone");
        assert!(!plan.is_right(Kind::Query, &answer(10, 4)) && plan.is_right(Kind::Query, &answer(10, 3)));
    }
}
