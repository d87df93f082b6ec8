//! What is sent: the calls of each mode by their number, seeded, and their right answers.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use prost::Message;
use sgl_kv_indexer::pb::{
    ApplyExternalKvBatchRequest, ExternalKvAction, ExternalKvActionType, ExternalKvPrefixMatch,
    MatchExternalKvPrefixRequest, MatchExternalKvPrefixResponse, TierType,
};

use crate::workload::{REPORT_HASHES, Seeded, worker_address, worker_name};

/// Route of applies.
pub(crate) const APPLY: &str = "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch";
/// Route of prefix queries.
pub(crate) const PREFIX: &str = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix";

/// Blocks of one report of the fill and mixed modes: a turn of a conversation.
const TURN: usize = 32;

/// Which calls are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
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
pub(crate) enum Kind {
    Query,
    Apply,
    Long,
}

impl Kind {
    pub(crate) const ALL: [(Kind, &'static str); 3] =
        [(Kind::Query, "query"), (Kind::Apply, "apply"), (Kind::Long, "long")];
}

/// One call, ready to send.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) body: Bytes,
}

/// Sizes of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) prompts: usize,
    pub(crate) blocks: usize,
    pub(crate) holders: usize,
    pub(crate) long_blocks: usize,
}

/// All calls of a run.
#[derive(Debug)]
pub(crate) struct Plan {
    mode: Mode,
    sizes: Sizes,
    prompts: Vec<Bytes>,
    long: Bytes,
    /// Length of a checked answer to a query, and to a long one; 0 until there was one.
    answers: [AtomicUsize; 2],
}

impl Plan {
    pub(crate) fn new(mode: Mode, sizes: Sizes) -> Self {
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
    pub(crate) fn preparation(&self) -> impl Iterator<Item = Bytes> + '_ {
        let prompts = self.prompts.len();
        let asked = (0..prompts).map(|prompt| (prompt, self.sizes.blocks));
        let long = (self.mode == Mode::LongScan).then_some((prompts, self.sizes.long_blocks));
        asked.chain(long).flat_map(|(prompt, blocks)| {
            let chain = chain(prompt, blocks);
            let parts: Vec<Vec<i64>> = chain.chunks(REPORT_HASHES).map(<[i64]>::to_vec).collect();
            (0..self.sizes.holders).flat_map(move |worker| {
                parts
                    .clone()
                    .into_iter()
                    .map(move |part| apply(worker, ExternalKvActionType::ActionReport, part))
            })
        })
    }

    /// Call number `number`.
    pub(crate) fn call(&self, number: usize) -> Call {
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
        let hashes = Seeded::new(!(number as u64) << 16).chain(TURN);
        Call { kind: Kind::Apply, body: apply(number % self.sizes.holders, action, hashes) }
    }

    /// Whether `answer` is the right one to a call of this kind.
    ///
    /// The first answer is read. Later ones have to be as long: all prompts have
    /// the same holders and lengths, and reading all would take the machine from
    /// the server.
    pub(crate) fn is_right(&self, kind: Kind, answer: &[u8]) -> bool {
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
pub(crate) fn answer(blocks: usize, holders: usize) -> Bytes {
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
    Seeded::new((prompt as u64) << 32).chain(blocks)
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
