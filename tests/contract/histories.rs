//! A few hundred random batches over gRPC, each answer compared with the oracle's.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use sgl_kv_indexer::arena::{Batch, CacheSpec};
use sgl_kv_indexer::scan::naive::{NaiveIndex, WorkerRow};

use crate::ops::{OwnedAction, OwnedBatch, Sizes, prompt, work, world};
use crate::served::*;

const SIZES: Sizes = Sizes { workers: 9, chain: 60, stretch: 40, fleet: 1 };
const BATCHES: u32 = 150;

fn request(batch: &OwnedBatch) -> Apply {
    let actions = batch.actions.iter().map(|action| match action {
        OwnedAction::Report { tier, hashes, masks, tokens } => report(tier.wire(), hashes, masks, tokens),
        OwnedAction::Revoke { tier, hashes } => revoke(tier.wire(), hashes),
        OwnedAction::Clear { tier } => clear(tier.wire()),
    });
    let spec = |spec: CacheSpec| Spec {
        version: spec.version,
        components: spec.components,
        swa_window_tokens: spec.swa_window_tokens,
        full_tier_mask: spec.full_tier_mask,
        swa_tier_mask: spec.swa_tier_mask,
        mamba_tier_mask: spec.mamba_tier_mask,
    };
    Apply {
        worker_id: batch.worker_id.clone(),
        seq: 7,
        actions: actions.collect(),
        worker_address: batch.address.clone(),
        cache_spec: batch.spec.map(spec),
    }
}

/// The oracle's rows in the form of [`text`].
fn expected_text(rows: &[WorkerRow]) -> String {
    let worker = |row: &WorkerRow| {
        let tiers = row.tiers.iter().map(|tier| {
            let block = tier.blocks.iter().map(|row| format!("{}/{}/{}", row.hash, row.mask, row.tokens));
            let name = format!("{:?}", tier.tier).to_uppercase();
            format!(" {name}[{}]", block.collect::<Vec<_>>().join(" "))
        });
        format!("{}@{}{}", row.worker_id, row.address, tiers.collect::<String>())
    };
    rows.iter().map(worker).collect::<Vec<_>>().join(", ")
}

async fn check(seed: u8) {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let world = draw(&mut runner, &world(SIZES.workers));
    let mut served = Served::start().await;
    let mut naive = NaiveIndex::default();
    for step in 0..BATCHES {
        let at = format!("seed {seed}, step {step}");
        let (worker, work) = draw(&mut runner, &(0..SIZES.workers, work(SIZES)));
        let batch = world.batch(worker, &work);
        served.apply(&request(&batch)).await;
        batch.lend(|batch: &Batch<'_>| naive.apply(batch)).expect("legal");

        let prompt = draw(&mut runner, &prompt(SIZES));
        let hashes = world.prompt(&prompt);
        let considered = match prompt.max_blocks as usize {
            0 => &hashes[..],
            limit => &hashes[..limit.min(hashes.len())],
        };
        let answer = served.prefix(&hashes, prompt.max_blocks).await;
        assert!(answer.matches.is_sorted_by_key(|row| u32::MAX - row.matched_prefix_blocks), "{at}");
        let best = answer.matches.first().map_or(0, |row| row.matched_prefix_blocks);
        assert_eq!(answer.best_prefix_blocks, best, "{at}");
        let mut found: Vec<(String, String, u32)> = answer
            .matches
            .into_iter()
            .map(|row| (row.worker_id, row.worker_address, row.matched_prefix_blocks))
            .collect();
        found.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
        assert_eq!(found, naive.prefix(considered), "{at}");
        let legal = naive.blocks_read(considered);
        assert!(legal.contains(&answer.blocks_read), "{at}: {} of {legal:?}", answer.blocks_read);

        let count = step % 3 == 0;
        let held = served.held(&hashes, count).await;
        assert_eq!(text(&held), expected_text(&naive.match_blocks(&hashes)), "{at}");
        if count {
            naive.count_hits(&hashes);
        }
        let counts = served.counts(&hashes).await;
        let counts: Vec<(i64, u64)> =
            counts.iter().map(|entry| (entry.hash, entry.hit_count_total)).collect();
        let expected = naive.hit_counts(&hashes).into_iter().map(|(at, hits)| (hashes[at as usize], hits));
        assert_eq!(counts, expected.collect::<Vec<_>>(), "{at}");
    }
}

fn draw<S: Strategy>(runner: &mut TestRunner, strategy: &S) -> S::Value {
    strategy.new_tree(runner).expect("nothing is filtered out").current()
}

#[tokio::test]
async fn random_batches_are_answered_as_the_oracle_does() {
    for seed in 0..6 {
        check(seed).await;
    }
}
