//! Clears of thousands of blocks, whose clean-up the index puts off, with everything going on meanwhile.
//!
//! What was cleared must be gone at once, and its token and hit counts with it,
//! while its traces still stand in the tables; reports, further clears and
//! address changes meet them there.

use proptest::collection::vec;
use proptest::prelude::*;
use sgl_kv_indexer::arena::{Keys, Tier};

use crate::histories::{cases, check};
use crate::ops::{
    Address, Change, Operation, Order, Piece, Prompt, Sizes, Spec, Step, Stretch, Values, Work, World,
    operation, prompt, world,
};

/// A chain several times longer than what is cleared at once.
const SIZES: Sizes = Sizes { workers: 3, chain: 4_000, stretch: 60, fleet: 3 };
/// Chunks as small as this still hold the chain in a few.
const CHUNK_SLOTS_MIN: usize = 512;

fn whole() -> Stretch {
    Stretch { start: 0, length: SIZES.chain, order: Order::Chain }
}

fn apply(worker: u32, changes: Vec<Change>) -> Operation {
    Operation::Apply { worker, work: Work { address: Address::Usual, spec: Spec::Usual, changes } }
}

/// A report or a clear of thousands of blocks.
fn large() -> impl Strategy<Value = Change> {
    let tier = || prop_oneof![3 => Just(Tier::Hbm), 1 => Just(Tier::Dram)];
    let length = prop_oneof![1 => Just(SIZES.chain), 2 => 500..SIZES.chain];
    let tokens = prop_oneof![Just(Values::Fitting), Just(Values::Absent)];
    prop_oneof![
        (tier(), length, tokens).prop_map(|(tier, length, tokens)| Change::Report {
            tier,
            blocks: vec![Stretch { length, ..whole() }],
            masks: Values::Fitting,
            tokens
        }),
        tier().prop_map(|tier| Change::Clear { tier }),
    ]
}

/// Large changes, several to a batch, and between them small ones of every kind.
fn large_or_small() -> impl Strategy<Value = Operation> {
    let count = Prompt { pieces: vec![Piece::Known(whole())], max_blocks: 0 };
    prop_oneof![
        7 => (0..SIZES.workers, vec(large(), 1..5)).prop_map(|(worker, changes)| apply(worker, changes)),
        1 => Just(Operation::Count { prompt: count }),
        8 => operation(SIZES),
    ]
}

fn history() -> impl Strategy<Value = (World, Vec<Step>)> {
    let step = (large_or_small(), vec(prompt(SIZES), 1..3))
        .prop_map(|(operation, prompts)| Step { operation, prompts });
    (world(SIZES.workers), vec(step, 1..30)).prop_map(|(mut world, steps)| {
        // Thousands of blocks that all collide take minutes.
        world.tuning.keys = Keys::Random;
        world.tuning.chunk_slots = world.tuning.chunk_slots.max(CHUNK_SLOTS_MIN);
        (world, steps)
    })
}

proptest! {
    #![proptest_config(cases(10))]

    #[test]
    fn cleared_blocks_are_gone_before_they_are_cleaned_up((world, steps) in history()) {
        check(&world, &steps)?;
    }
}
