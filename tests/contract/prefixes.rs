//! `MatchExternalKvPrefix`: order, cut, and the rules of every kind of spec.

use crate::served::*;

#[tokio::test]
async fn matches_stand_longest_first_in_a_repeatable_order() {
    let holds =
        |worker: &str, count: i64| batch(worker, &[report(HBM, &(1..=count).collect::<Vec<_>>(), &[], &[])]);
    let mut batches: Vec<Apply> = (0..70).map(|worker| holds(&format!("w{worker:02}"), worker % 7)).collect();
    batches.retain(|batch| !batch.actions[0].hashes.is_empty());
    batches.push(Apply { worker_address: String::new(), ..holds("hidden", 9) });
    batches.push(batch("elsewhere", &[report(HBM, &[2, 3], &[], &[])]));
    let mut served = Served::with(&batches).await;
    let answer = served.prefix(&[1, 2, 3, 4, 5, 6, 7, 8], 0).await;
    let blocks: Vec<u32> = answer.matches.iter().map(|row| row.matched_prefix_blocks).collect();
    let expected: Vec<u32> = (1..7).rev().flat_map(|count| [count; 10]).collect();
    assert_eq!(blocks, expected);
    assert_eq!(answer.best_prefix_blocks, 6);
    assert!((7..=8).contains(&answer.blocks_read), "{}", answer.blocks_read);
    for _ in 0..5 {
        assert_eq!(served.prefix(&[1, 2, 3, 4, 5, 6, 7, 8], 0).await, answer);
    }
}

#[tokio::test]
async fn a_miss_of_the_first_block_reads_one() {
    let mut served = Served::with(&[batch("w", &[report(HBM, &[1, 2], &[], &[])])]).await;
    for hashes in [&[9][..], &[9, 1, 2], &[-1; 20_000]] {
        let answer = served.prefix(hashes, 0).await;
        assert_eq!((answer.matches.len(), answer.best_prefix_blocks, answer.blocks_read), (0, 0, 1));
    }
    served.apply(&batch("w", &[clear(HBM)])).await;
    assert_eq!(served.prefix(&[1, 2], 0).await.blocks_read, 1, "a block that was held once");
}

#[tokio::test]
async fn only_so_many_leading_blocks_are_considered() {
    let actions = [report(HBM, &[1, 2, 3, 4], &[], &[]), report(HBM, &[5], &[FULL], &[])];
    let mut served = Served::with(&[batch("w", &actions)]).await;
    let prompt = [1, 2, 3, 4, 5];
    let rows = [(0, ""), (1, "w=1"), (3, "w=3"), (4, "w=4"), (5, ""), (6, ""), (u32::MAX, "")];
    for (max_blocks, expected) in rows {
        let answer = served.prefix(&prompt, max_blocks).await;
        assert_eq!(prefixes(&answer), expected, "max_blocks {max_blocks}");
        let considered = if max_blocks == 0 { 5 } else { max_blocks.min(5) };
        assert!((1..=considered).contains(&answer.blocks_read), "max_blocks {max_blocks}");
    }
    let rows: [(&[i64], &str); 4] =
        [(&[1, 1, 1], "w=3"), (&[1, 2, 1, 2, 1], "w=5"), (&[1, 2, 9, 3], "w=2"), (&[2, 1], "w=2")];
    for (hashes, expected) in rows {
        assert_eq!(prefixes(&served.prefix(hashes, 0).await), expected, "{hashes:?}");
    }
}

/// A worker with this spec that holds block `n`, from 1, with the n-th mask and size at HBM,
/// `None` being a gap; `extra` comes after that.
async fn check(spec: Option<Spec>, held: &[Option<(u32, u32)>], extra: &[Action], expected: u32) {
    let mut actions = Vec::new();
    for (hash, block) in (1..).zip(held) {
        if let Some((mask, size)) = block {
            actions.push(report(HBM, &[hash], &[*mask], &[*size]));
        }
    }
    actions.extend_from_slice(extra);
    let mut served = Served::with(&[Apply { cache_spec: spec, ..batch("w", &actions) }]).await;
    let prompt: Vec<i64> = (1..).take(held.len()).collect();
    let answer = served.prefix(&prompt, 0).await;
    assert_eq!(answer.best_prefix_blocks, expected, "{spec:?} {held:?} {extra:?}");
}

#[tokio::test]
async fn workers_without_spec_hold_whole_blocks_at_any_tier() {
    let whole = Some((0, 0));
    check(None, &[whole, whole], &[], 2).await;
    check(None, &[whole, None, whole], &[], 1).await;
    check(None, &[None, whole], &[], 0).await;
    check(None, &[whole, None], &[report(SSD, &[2], &[], &[])], 2).await;
    check(None, &[None, None], &[report(SSD, &[1], &[], &[]), report(DRAM, &[2], &[], &[])], 2).await;
    check(None, &[whole, Some((1, 0))], &[], 0).await;
    check(None, &[whole, Some((0x100, 0))], &[], 0).await;
    check(None, &[whole, whole], &[report(SSD, &[2], &[4], &[])], 0).await;
    check(None, &[whole, None, None, Some((2, 0))], &[], 0).await;
    check(None, &[whole, whole], &[report(HBM, &[3], &[7], &[])], 2).await;
}

#[tokio::test]
async fn some_specs_never_match() {
    let held = [Some((7, 64)); 2];
    let with = |change: fn(&mut Spec)| {
        let mut spec = spec(FULL | SWA, 32).expect("a spec");
        change(&mut spec);
        Some(spec)
    };
    check(with(|_| {}), &held, &[], 2).await;
    check(with(|spec| spec.version = 0), &held, &[], 2).await;
    check(with(|spec| spec.version = 2), &held, &[], 0).await;
    check(with(|spec| spec.components = 0), &held, &[], 0).await;
    check(with(|spec| spec.swa_window_tokens = 0), &held, &[], 0).await;
    check(with(|spec| (spec.components, spec.swa_window_tokens) = (5, 0)), &held, &[], 2).await;
    check(Some(Spec::default()), &held, &[], 0).await;
}

#[tokio::test]
async fn full_is_needed_everywhere_at_a_servable_tier() {
    let full = spec(FULL, 0);
    let tiers = |full_tier_mask| full.map(|spec| Spec { full_tier_mask, ..spec });
    let (f, gap) = (Some((FULL, 0)), None);
    check(full, &[f, f, f], &[], 3).await;
    check(full, &[f, gap, f], &[], 1).await;
    check(full, &[f, Some((0, 0)), f], &[], 1).await;
    check(full, &[f, Some((6, 0)), f], &[], 1).await;
    check(full, &[f, gap, f], &[report(DRAM, &[2], &[1], &[])], 3).await;
    check(full, &[f, gap, f], &[report(SSD, &[2], &[1], &[])], 1).await;
    check(tiers(1 << SSD), &[gap, gap], &[report(SSD, &[1, 2], &[1, 1], &[])], 0).await;
    check(tiers(1 << HBM), &[f, gap], &[report(DRAM, &[2], &[1], &[])], 1).await;
    check(tiers(1 << DRAM), &[f, gap], &[], 0).await;
    check(tiers(u32::MAX), &[f, f], &[], 2).await;
    check(tiers(0), &[f, f], &[], 0).await;
    check(spec(MAMBA, 0), &[Some((MAMBA, 0))], &[], 0).await;
}

#[tokio::test]
async fn the_sliding_window_is_covered_or_reaches_the_head() {
    let swa = spec(FULL | SWA, 32);
    let (f, fs) = (Some((1, 16)), |size| Some((3, size)));
    check(swa, &[fs(0), fs(0)], &[], 2).await;
    check(swa, &[fs(0), f], &[], 1).await;
    check(swa, &[f, fs(16)], &[], 0).await;
    check(swa, &[f, fs(16), fs(15)], &[], 0).await;
    check(swa, &[f, fs(16), fs(16)], &[], 3).await;
    check(swa, &[f, fs(16), fs(0), fs(16), f], &[], 4).await;
    check(swa, &[fs(16), f, fs(16)], &[], 1).await;
    check(swa, &[fs(16), f, fs(16), fs(16)], &[], 4).await;
    check(swa, &[f, fs(31), f, fs(31)], &[], 0).await;
    check(swa, &[fs(0), Some((2, 64)), fs(64)], &[], 1).await;
    check(swa, &[fs(0), f], &[report(DRAM, &[2], &[SWA], &[32])], 2).await;
    check(swa, &[fs(0), f], &[report(SSD, &[2], &[SWA], &[32])], 1).await;
    check(spec(FULL | SWA, u32::MAX), &[f, fs(u32::MAX - 1), fs(u32::MAX - 1)], &[], 3).await;
}

#[tokio::test]
async fn a_mamba_state_is_needed_at_the_end() {
    let mamba = spec(FULL | MAMBA, 0);
    let (f, fm) = (Some((1, 0)), Some((5, 0)));
    check(mamba, &[f, f, fm], &[], 3).await;
    check(mamba, &[f, fm, f], &[], 2).await;
    check(mamba, &[f, f], &[], 0).await;
    check(mamba, &[fm, Some((4, 0)), fm], &[], 1).await;
    check(mamba, &[fm, f], &[report(DRAM, &[2], &[MAMBA], &[])], 2).await;
    check(mamba, &[fm, f], &[report(SSD, &[2], &[MAMBA], &[])], 1).await;
    let all = spec(FULL | SWA | MAMBA, 32);
    check(all, &[Some((7, 0)), Some((3, 0)), Some((5, 0))], &[], 1).await;
    check(all, &[f, Some((3, 32)), Some((7, 0))], &[], 3).await;
}
