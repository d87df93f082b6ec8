//! Random histories of a few dozen operations, shrunk to the shortest that tells the two apart.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::ops::{Sizes, Step, World, step, world};
use crate::pair::Pair;

/// Cases of a property, unless `PROPTEST_CASES` says otherwise; `share` is its part of the whole in percent.
pub(crate) fn cases(share: u32) -> Config {
    const CASES: u32 = 400;
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = CASES * share / 100;
    }
    config
}

fn history(sizes: Sizes, steps: usize) -> impl Strategy<Value = (World, Vec<Step>)> {
    (world(sizes.workers), vec(step(sizes), 1..steps))
}

pub(crate) fn check(world: &World, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut pair = Pair::new(world.tuning);
    for (place, step) in steps.iter().enumerate() {
        pair.step(world, step)
            .map_err(|difference| TestCaseError::fail(format!("after step {place}: {difference}")))?;
    }
    pair.audit().map_err(TestCaseError::fail)
}

/// So few blocks that every operation meets the last one's.
const CROWDED: Sizes = Sizes { workers: 3, chain: 12, stretch: 12, fleet: 3 };
/// Chains long enough for bulk comparison, a handful of workers.
const CHAINS: Sizes = Sizes { workers: 8, chain: 200, stretch: 80, fleet: 8 };
/// Runs longer than a scan compares at once.
const LONG: Sizes = Sizes { workers: 4, chain: 800, stretch: 700, fleet: 4 };
/// Past one machine word of workers.
const SEVENTY: Sizes = Sizes { workers: 70, chain: 60, stretch: 40, fleet: 70 };
/// Past two.
const HUNDREDS: Sizes = Sizes { workers: 150, chain: 60, stretch: 40, fleet: 150 };

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn few_blocks_and_three_workers((world, steps) in history(CROWDED, 60)) {
        check(&world, &steps)?;
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn chains_and_eight_workers((world, steps) in history(CHAINS, 40)) {
        check(&world, &steps)?;
    }
}

proptest! {
    #![proptest_config(cases(10))]

    #[test]
    fn long_runs((world, steps) in history(LONG, 12)) {
        check(&world, &steps)?;
    }
}

proptest! {
    #![proptest_config(cases(25))]

    #[test]
    fn seventy_workers((world, steps) in history(SEVENTY, 30)) {
        check(&world, &steps)?;
    }
}

proptest! {
    #![proptest_config(cases(15))]

    #[test]
    fn a_hundred_and_fifty_workers((world, steps) in history(HUNDREDS, 20)) {
        check(&world, &steps)?;
    }
}
