//! Long walks: twenty thousand operations by 256 workers, compared now and then.
//!
//! What decays does so slowly: free slots scattered, ids reused many times,
//! reference counts that drift. A failure names its seed.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::ops::{Sizes, operation, prompt, world};
use crate::pair::{Checked, Pair};

const SIZES: Sizes = Sizes { workers: 256, chain: 1_200, stretch: 100, fleet: 12 };
const OPERATIONS: u32 = 5_000;
/// Operations between two comparisons.
const INTERVAL: u32 = 500;
/// Prompts of a comparison.
const PROMPTS: u32 = 4;

fn walk(seed: u8) -> Checked {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let world = draw(&mut runner, &world(SIZES.workers));
    let (operations, prompts) = (operation(SIZES), prompt(SIZES));
    let mut pair = Pair::new(world.tuning);
    for done in 1..=OPERATIONS {
        let operation = draw(&mut runner, &operations);
        pair.run(&world, &operation).map_err(|difference| format!("at {done}: {difference}"))?;
        if done % INTERVAL == 0 {
            let at = |difference| format!("after {done} operations: {difference}");
            pair.audit().map_err(at)?;
            for _ in 0..PROMPTS {
                let prompt = draw(&mut runner, &prompts);
                let hashes = world.prompt(&prompt);
                pair.check_prefix(&hashes, prompt.max_blocks).map_err(at)?;
                pair.check_blocks(&hashes).map_err(at)?;
                pair.check_counts(&hashes).map_err(at)?;
            }
        }
    }
    pair.settle()?;
    pair.audit()
}

fn draw<S: Strategy>(runner: &mut TestRunner, strategy: &S) -> S::Value {
    strategy.new_tree(runner).expect("nothing is filtered out").current()
}

fn check(seed: u8) {
    if let Err(difference) = walk(seed) {
        panic!("seed {seed}: {difference}");
    }
}

#[test]
fn walk_1() {
    check(1);
}

#[test]
fn walk_2() {
    check(2);
}

#[test]
fn walk_3() {
    check(3);
}

#[test]
fn walk_4() {
    check(4);
}
