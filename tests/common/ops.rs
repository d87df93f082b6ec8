//! Random work for an index: a small language of operations, what it means, and how to make it up.
//!
//! Operations name blocks by their place in a chain; a [`Pool`] turns places
//! into hashes, so that one list of operations runs over dense, strided or
//! colliding hashes alike. Everything prints itself and shrinks.

#![allow(dead_code, reason = "each test uses a part")]

use proptest::collection::vec;
use proptest::prelude::*;
use sgl_kv_indexer::arena::{Action, Batch, CacheSpec, Keys, PackedHashes, Tier, Tuning};

/// What hashes the blocks of a chain have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pool {
    /// As real ones: all bits random.
    Random,
    /// 0, 1, 2 and on.
    Dense,
    /// Neighbours differ by this power of two, wrapping around.
    Strided(u32),
    /// -1, -2 and on.
    Negative,
    /// Random above, all the same in the low 32 bits.
    SameLow,
    /// Random below, all the same in the high 32 bits.
    SameHigh,
}

impl Pool {
    pub(crate) const ALL: [Pool; 10] = [
        Pool::Random,
        Pool::Dense,
        Pool::Strided(3),
        Pool::Strided(16),
        Pool::Strided(32),
        Pool::Strided(48),
        Pool::Strided(60),
        Pool::Negative,
        Pool::SameLow,
        Pool::SameHigh,
    ];

    /// The hash of the block at `place`; places apart have hashes apart.
    pub(crate) fn hash(self, place: u32) -> i64 {
        let number = i64::from(place);
        // An odd factor permutes the 32-bit numbers.
        let shuffled = i64::from(place.wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995);
        match self {
            Pool::Random => i64::from_le_bytes(mix(u64::from(place)).to_le_bytes()),
            Pool::Dense => number,
            Pool::Strided(bits) => (number + 1).rotate_left(bits),
            Pool::Negative => -1 - number,
            Pool::SameLow => (shuffled << 32) | 0x1234_5678,
            Pool::SameHigh => (0x1234_5678 << 32) | shuffled,
        }
    }
}

/// A bijection of 64-bit numbers whose output looks random.
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Some blocks of the chain, in some order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    pub(crate) start: u32,
    pub(crate) length: u32,
    pub(crate) order: Order,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    /// Parents first.
    Chain,
    /// Children first.
    Reversed,
    /// Any order, drawn by this seed.
    Shuffled(u64),
    /// Each block twice in a row.
    Doubled,
    /// The whole stretch, then the whole stretch again.
    Again,
    /// Every n-th block only.
    Every(u32),
}

impl Stretch {
    fn places(self) -> Vec<u32> {
        let mut places: Vec<u32> = (self.start..self.start + self.length).collect();
        match self.order {
            Order::Chain => {}
            Order::Reversed => places.reverse(),
            Order::Shuffled(seed) => places.sort_by_key(|place| mix(seed ^ u64::from(*place))),
            Order::Doubled => places = places.iter().flat_map(|place| [*place; 2]).collect(),
            Order::Again => places.extend_from_within(..),
            Order::Every(n) => places = places.into_iter().step_by(n as usize).collect(),
        }
        places
    }
}

/// Metadata of an action's blocks.
#[derive(Debug, Clone)]
pub(crate) enum Values {
    /// Not sent.
    Absent,
    /// Masks that the worker's usual spec would ask for; token counts of 16.
    Fitting,
    /// These values, each for so many blocks, over and over.
    Stretches(Vec<(u32, u32)>),
}

impl Values {
    fn list(&self, fitting: Option<u32>, count: usize) -> Vec<u32> {
        match self {
            Values::Absent => Vec::new(),
            Values::Fitting => fitting.map(|value| vec![value; count]).unwrap_or_default(),
            Values::Stretches(stretches) => {
                let cycle = stretches.iter().flat_map(|(value, times)| (0..*times).map(|_| *value));
                cycle.cycle().take(count).collect()
            }
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Change {
    Report { tier: Tier, blocks: Vec<Stretch>, masks: Values, tokens: Values },
    Revoke { tier: Tier, blocks: Vec<Stretch> },
    Clear { tier: Tier },
}

/// A worker's address in a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Address {
    Usual,
    None,
    /// One that other workers may have too.
    Shared,
}

/// A worker's cache spec in a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spec {
    /// The one that this worker has in this world.
    Usual,
    Other(Option<CacheSpec>),
}

#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) address: Address,
    pub(crate) spec: Spec,
    pub(crate) changes: Vec<Change>,
}

/// A fault put at the end of a batch that is legal up to there.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    EmptyWorkerId,
    ReportOfNothing,
    RevokeOfNothing,
    MasksLength,
    TokensLength,
}

#[derive(Debug, Clone)]
pub(crate) enum Operation {
    /// One worker's batch.
    Apply { worker: u32, work: Work },
    /// The same batch from so many workers in a row, as the system prompt makes them send it.
    Fleet { first: u32, count: u32, work: Work },
    /// A batch that must be refused.
    Refused { worker: u32, work: Work, fault: Fault },
    /// A look-up that counts hits.
    Count { prompt: Prompt },
    /// So many steps of put-off clean-up.
    Maintain { steps: u32 },
    /// An operator removes a worker.
    Remove { worker: u32 },
    /// A worker is left out of answers, or taken in again.
    Silence { worker: u32, silent: bool },
}

/// A query's blocks.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) pieces: Vec<Piece>,
    /// As in the prefix query; 0 is no limit.
    pub(crate) max_blocks: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece {
    Known(Stretch),
    /// So many blocks that nobody ever reports.
    Unknown(u32),
}

/// An operation and what is asked after it.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) operation: Operation,
    pub(crate) prompts: Vec<Prompt>,
}

/// What stays the same while operations run.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) tuning: Tuning,
    pub(crate) pool: Pool,
    pub(crate) workers: u32,
    /// Usual specs, dealt out to workers in turn.
    pub(crate) specs: Vec<Option<CacheSpec>>,
}

/// A batch that owns what [`Batch`] borrows.
#[derive(Debug, Clone)]
pub(crate) struct OwnedBatch {
    pub(crate) worker_id: String,
    pub(crate) address: String,
    pub(crate) spec: Option<CacheSpec>,
    pub(crate) actions: Vec<OwnedAction>,
}

#[derive(Debug, Clone)]
pub(crate) enum OwnedAction {
    Report { tier: Tier, hashes: Vec<i64>, masks: Vec<u32>, tokens: Vec<u32> },
    Revoke { tier: Tier, hashes: Vec<i64> },
    Clear { tier: Tier },
}

impl OwnedBatch {
    /// Lends the batch to `use_it`.
    pub(crate) fn lend<R>(&self, use_it: impl FnOnce(&Batch<'_>) -> R) -> R {
        let packed: Vec<Vec<u8>> = self
            .actions
            .iter()
            .map(|action| match action {
                OwnedAction::Report { hashes, .. } | OwnedAction::Revoke { hashes, .. } => {
                    PackedHashes::pack(hashes)
                }
                OwnedAction::Clear { .. } => Vec::new(),
            })
            .collect();
        let actions: Vec<Action<'_>> = self
            .actions
            .iter()
            .zip(&packed)
            .map(|(action, packed)| {
                let hashes = PackedHashes::new(packed).expect("whole hashes");
                match action {
                    OwnedAction::Report { tier, masks, tokens, .. } => {
                        Action::Report { tier: *tier, hashes, masks, tokens }
                    }
                    OwnedAction::Revoke { tier, .. } => Action::Revoke { tier: *tier, hashes },
                    OwnedAction::Clear { tier } => Action::ClearTier { tier: *tier },
                }
            })
            .collect();
        use_it(&Batch {
            worker_id: &self.worker_id,
            worker_address: &self.address,
            cache_spec: self.spec,
            seq: 0,
            actions: &actions,
        })
    }
}

impl World {
    /// Whether the index can be audited after every step; an audit visits every slot of a chunk.
    pub(crate) fn audits_are_cheap(&self) -> bool {
        self.tuning.chunk_slots <= 1_024
    }

    pub(crate) fn hashes(&self, blocks: &[Stretch]) -> Vec<i64> {
        blocks.iter().flat_map(|stretch| stretch.places()).map(|place| self.pool.hash(place)).collect()
    }

    /// The prompt's hashes, not yet cut to its `max_blocks`.
    pub(crate) fn prompt(&self, prompt: &Prompt) -> Vec<i64> {
        let mut hashes = Vec::new();
        let mut unknown = u32::MAX / 2;
        for piece in &prompt.pieces {
            match piece {
                Piece::Known(stretch) => hashes.extend(self.hashes(&[*stretch])),
                Piece::Unknown(count) => {
                    hashes.extend((0..*count).map(|n| self.pool.hash(unknown + n)));
                    unknown += count;
                }
            }
        }
        hashes
    }

    pub(crate) fn name(&self, worker: u32) -> String {
        format!("worker-{}", worker % self.workers)
    }

    pub(crate) fn batch(&self, worker: u32, work: &Work) -> OwnedBatch {
        let worker = worker % self.workers;
        let usual = self.specs[worker as usize % self.specs.len()];
        let fitting = usual.map(|spec| spec.components & 7);
        let actions = work.changes.iter().map(|change| match change {
            Change::Report { tier, blocks, masks, tokens } => {
                let hashes = self.hashes(blocks);
                let masks = masks.list(fitting, hashes.len());
                let tokens = tokens.list(Some(16), hashes.len());
                OwnedAction::Report { tier: *tier, hashes, masks, tokens }
            }
            Change::Revoke { tier, blocks } => {
                OwnedAction::Revoke { tier: *tier, hashes: self.hashes(blocks) }
            }
            Change::Clear { tier } => OwnedAction::Clear { tier: *tier },
        });
        OwnedBatch {
            worker_id: self.name(worker),
            address: match work.address {
                Address::Usual => format!("http://worker-{worker}:30000"),
                Address::None => String::new(),
                Address::Shared => "http://shared:30000".to_owned(),
            },
            spec: match work.spec {
                Spec::Usual => usual,
                Spec::Other(spec) => spec,
            },
            actions: actions.collect(),
        }
    }

    pub(crate) fn faulty(&self, worker: u32, work: &Work, fault: Fault) -> OwnedBatch {
        let mut batch = self.batch(worker, work);
        let tier = Tier::Hbm;
        let hashes = vec![self.pool.hash(0), self.pool.hash(1)];
        match fault {
            Fault::EmptyWorkerId => batch.worker_id.clear(),
            Fault::ReportOfNothing => batch.actions.push(OwnedAction::Report {
                tier,
                hashes: Vec::new(),
                masks: Vec::new(),
                tokens: Vec::new(),
            }),
            Fault::RevokeOfNothing => batch.actions.push(OwnedAction::Revoke { tier, hashes: Vec::new() }),
            Fault::MasksLength => {
                batch.actions.push(OwnedAction::Report { tier, hashes, masks: vec![1], tokens: Vec::new() })
            }
            Fault::TokensLength => batch.actions.push(OwnedAction::Report {
                tier,
                hashes,
                masks: Vec::new(),
                tokens: vec![1; 3],
            }),
        }
        batch
    }
}

/// Sizes of what the strategies below make up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) workers: u32,
    /// Blocks of the chain.
    pub(crate) chain: u32,
    /// Longest stretch of a report or prompt.
    pub(crate) stretch: u32,
    /// Most workers of one fleet operation.
    pub(crate) fleet: u32,
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![4 => Just(Tier::Hbm), 2 => Just(Tier::Dram), 1 => Just(Tier::Ssd)]
}

fn order() -> impl Strategy<Value = Order> {
    prop_oneof![
        8 => Just(Order::Chain),
        1 => Just(Order::Reversed),
        1 => any::<u64>().prop_map(Order::Shuffled),
        1 => Just(Order::Doubled),
        1 => Just(Order::Again),
        2 => (2u32..5).prop_map(Order::Every),
    ]
}

fn stretch(sizes: Sizes) -> impl Strategy<Value = Stretch> {
    // Half of all stretches begin at the head, or no prompt would ever match.
    let start = prop_oneof![1 => Just(0), 1 => 0..sizes.chain];
    (start, 1..=sizes.stretch, order()).prop_map(move |(start, length, order)| Stretch {
        start,
        length: length.min(sizes.chain - start),
        order,
    })
}

/// For how many blocks in a row a value stays: a few, or more than are compared at once.
fn run() -> impl Strategy<Value = u32> {
    prop_oneof![3 => 1u32..9, 1 => 9u32..600]
}

fn masks() -> impl Strategy<Value = Values> {
    let mask = prop_oneof![
        4 => 0u32..8,
        2 => Just(7),
        1 => Just(0x100),
        1 => any::<u32>(),
    ];
    prop_oneof![
        6 => Just(Values::Fitting),
        1 => Just(Values::Absent),
        3 => vec((mask, run()), 1..4).prop_map(Values::Stretches),
    ]
}

fn tokens() -> impl Strategy<Value = Values> {
    let size = prop_oneof![4 => Just(16u32), 2 => Just(0), 2 => 1u32..40, 1 => Just(u32::MAX)];
    prop_oneof![
        3 => Just(Values::Fitting),
        2 => Just(Values::Absent),
        2 => vec((size, run()), 1..4).prop_map(Values::Stretches),
    ]
}

fn change(sizes: Sizes) -> impl Strategy<Value = Change> {
    let blocks = || vec(stretch(sizes), 1..3);
    prop_oneof![
        8 => (tier(), blocks(), masks(), tokens())
            .prop_map(|(tier, blocks, masks, tokens)| Change::Report { tier, blocks, masks, tokens }),
        4 => (tier(), blocks()).prop_map(|(tier, blocks)| Change::Revoke { tier, blocks }),
        1 => tier().prop_map(|tier| Change::Clear { tier }),
    ]
}

/// Specs a fleet might have, and some that no fleet should.
pub(crate) fn spec() -> impl Strategy<Value = Option<CacheSpec>> {
    let components = prop_oneof![
        4 => Just(1u32), 4 => Just(3), 4 => Just(5), 4 => Just(7),
        1 => Just(0), 1 => Just(2), 1 => Just(4), 1 => Just(8), 1 => any::<u32>(),
    ];
    let tiers = || prop_oneof![6 => Just(0b110u32), 2 => Just(0b010), 1 => 0u32..16, 1 => any::<u32>()];
    let version = prop_oneof![2 => Just(0u32), 8 => Just(1), 1 => Just(2)];
    // Mostly what whole blocks of 16 tokens can just reach.
    let window = prop_oneof![1 => Just(0u32), 2 => Just(1), 4 => 1u32..200, 6 => (1u32..9).prop_map(|blocks| blocks * 16), 1 => Just(u32::MAX)];
    let some = (version, components, window, tiers(), tiers(), tiers()).prop_map(
        |(version, components, swa_window_tokens, full_tier_mask, swa_tier_mask, mamba_tier_mask)| {
            Some(CacheSpec {
                version,
                components,
                swa_window_tokens,
                full_tier_mask,
                swa_tier_mask,
                mamba_tier_mask,
            })
        },
    );
    prop_oneof![1 => Just(None), 2 => some]
}

pub(crate) fn work(sizes: Sizes) -> impl Strategy<Value = Work> {
    let address =
        prop_oneof![12 => Just(Address::Usual), 1 => Just(Address::None), 1 => Just(Address::Shared)];
    let other = prop_oneof![12 => Just(Spec::Usual), 1 => spec().prop_map(Spec::Other)];
    (address, other, vec(change(sizes), 0..4)).prop_map(|(address, spec, changes)| Work {
        address,
        spec,
        changes,
    })
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::EmptyWorkerId),
        Just(Fault::ReportOfNothing),
        Just(Fault::RevokeOfNothing),
        Just(Fault::MasksLength),
        Just(Fault::TokensLength),
    ]
}

pub(crate) fn prompt(sizes: Sizes) -> impl Strategy<Value = Prompt> {
    let piece = prop_oneof![
        8 => stretch(sizes).prop_map(Piece::Known),
        1 => (1u32..4).prop_map(Piece::Unknown),
    ];
    // Most prompts open as chains do; the others open anywhere.
    let head = (1..=sizes.stretch)
        .prop_map(|length| Piece::Known(Stretch { start: 0, length, order: Order::Chain }));
    let pieces = prop_oneof![
        2 => head.prop_map(|head| vec![head]),
        1 => vec(piece, 1..4),
    ];
    let max_blocks = prop_oneof![3 => Just(0u32), 1 => 1..=sizes.stretch];
    (pieces, max_blocks).prop_map(|(pieces, max_blocks)| Prompt { pieces, max_blocks })
}

pub(crate) fn operation(sizes: Sizes) -> impl Strategy<Value = Operation> {
    let worker = move || 0..sizes.workers;
    prop_oneof![
        10 => (worker(), work(sizes)).prop_map(|(worker, work)| Operation::Apply { worker, work }),
        3 => (worker(), 1..=sizes.fleet, work(sizes))
            .prop_map(|(first, count, work)| Operation::Fleet { first, count, work }),
        1 => (worker(), work(sizes), fault())
            .prop_map(|(worker, work, fault)| Operation::Refused { worker, work, fault }),
        1 => prompt(sizes).prop_map(|prompt| Operation::Count { prompt }),
        1 => (1u32..40).prop_map(|steps| Operation::Maintain { steps }),
        1 => worker().prop_map(|worker| Operation::Remove { worker }),
        1 => (worker(), any::<bool>()).prop_map(|(worker, silent)| Operation::Silence { worker, silent }),
    ]
}

pub(crate) fn step(sizes: Sizes) -> impl Strategy<Value = Step> {
    (operation(sizes), vec(prompt(sizes), 1..4)).prop_map(|(operation, prompts)| Step { operation, prompts })
}

/// The index as it ships, and settings under which its luck runs out.
pub(crate) fn tuning() -> impl Strategy<Value = Tuning> {
    let usual = Tuning::default();
    let tiny = Tuning { chunk_slots: 1, segment_bits: 0, segment_ids: 9, ..usual };
    let small = Tuning { chunk_slots: 7, segment_bits: 1, segment_ids: 30, ..usual };
    let scattered = Tuning { scattered: true, ..usual };
    let colliding = Tuning { keys: Keys::Colliding, ..usual };
    let all = Tuning { chunk_slots: 64, segment_ids: 9, scattered: true, keys: Keys::Colliding, ..tiny };
    // Chunks of the usual kind, but so short that checking all slots after each step is cheap.
    let short = Tuning { chunk_slots: 512, ..usual };
    prop_oneof![
        3 => Just(short),
        1 => Just(usual),
        1 => Just(tiny),
        2 => Just(small),
        1 => Just(scattered),
        1 => Just(colliding),
        1 => Just(all),
    ]
}

pub(crate) fn world(workers: u32) -> impl Strategy<Value = World> {
    (tuning(), proptest::sample::select(&Pool::ALL[..]), vec(spec(), 1..5))
        .prop_map(move |(tuning, pool, specs)| World { tuning, pool, workers, specs })
}
