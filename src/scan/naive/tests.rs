//! The oracle worked by hand: each row of the rules, both ways.

use super::*;

/// One block as the worker holds it: nothing, or placements `components@tier:tokens` joined
/// by `+`. Components are letters F, S, M, `-` for mask 0 and `x` for a bit beyond the three;
/// the tier is h, d or s, HBM if not said; tokens are unknown if not said.
type Block = &'static str;

fn placements(block: Block) -> Vec<(Tier, u32, u32)> {
    if block == "." {
        return Vec::new();
    }
    let placement = |text: &str| {
        let (text, tokens) = text.split_once(':').unwrap_or((text, "0"));
        let (components, tier) = text.split_once('@').unwrap_or((text, "h"));
        let tier = match tier {
            "h" => Tier::Hbm,
            "d" => Tier::Dram,
            "s" => Tier::Ssd,
            other => panic!("tier {other}"),
        };
        let mask = components.chars().map(|letter| match letter {
            '-' => 0,
            'F' => CacheSpec::FULL,
            'S' => CacheSpec::SWA,
            'M' => CacheSpec::MAMBA,
            'x' => 0x100,
            other => panic!("component {other}"),
        });
        (tier, mask.sum(), tokens.parse().expect("a number"))
    };
    block.split('+').map(placement).collect()
}

/// A worker whose block number `n`, from 1, is the n-th word of `blocks`.
fn index(spec: Option<CacheSpec>, blocks: &'static str) -> (NaiveIndex, Vec<i64>) {
    let mut index = NaiveIndex::default();
    let mut hashes = Vec::new();
    batch(&mut index, "w", "http://w", spec, &[]);
    for (hash, block) in (1..).zip(blocks.split_whitespace()) {
        hashes.push(hash);
        for (tier, mask, tokens) in placements(block) {
            index.report("w", tier, hash, mask, tokens);
        }
    }
    (index, hashes)
}

fn batch(index: &mut NaiveIndex, id: &str, address: &str, spec: Option<CacheSpec>, actions: &[Action<'_>]) {
    let batch = Batch { worker_id: id, worker_address: address, cache_spec: spec, seq: 0, actions };
    index.apply(&batch).expect("a legal batch");
}

fn blocks(index: &NaiveIndex, hashes: &[i64]) -> u32 {
    index.prefix(hashes).first().map_or(0, |row| row.2)
}

#[track_caller]
fn check(spec: Option<CacheSpec>, held: &'static str, expected: u32) {
    let (index, hashes) = index(spec, held);
    assert_eq!(blocks(&index, &hashes), expected, "{spec:?} {held}");
}

const BOTH: u32 = (1 << 1) | (1 << 2);
const FULL: CacheSpec = CacheSpec {
    version: 1,
    components: CacheSpec::FULL,
    swa_window_tokens: 0,
    full_tier_mask: BOTH,
    swa_tier_mask: BOTH,
    mamba_tier_mask: BOTH,
};
const SWA: CacheSpec =
    CacheSpec { components: CacheSpec::FULL | CacheSpec::SWA, swa_window_tokens: 32, ..FULL };
const MAMBA: CacheSpec = CacheSpec { components: CacheSpec::FULL | CacheSpec::MAMBA, ..FULL };
const ALL: CacheSpec = CacheSpec { components: CacheSpec::FULL | CacheSpec::SWA | CacheSpec::MAMBA, ..SWA };

#[test]
fn a_worker_without_spec_needs_whole_blocks_at_any_tier() {
    let rows = [
        ("-", 1),
        ("- - -", 3),
        ("-@d - -@s", 3),
        ("-@h+-@s - -", 3),
        ("- . -", 1),
        (". - -", 0),
        ("F", 0),
        ("x - -", 0),
        ("- F -", 0),
        ("- - F@s", 0),
        ("- -@h+F@d -", 0),
        ("- . F", 0),
        ("- . . . -+S@s", 0),
        (". . F", 0),
    ];
    for (held, expected) in rows {
        check(None, held, expected);
    }
}

#[test]
fn masks_past_the_considered_blocks_do_not_fail_a_worker() {
    let (index, hashes) = index(None, "- - . F");
    assert_eq!(blocks(&index, &hashes), 0);
    assert_eq!(blocks(&index, &hashes[..3]), 2);
    assert_eq!(blocks(&index, &[1, 2, 1, 2, 1]), 5);
    assert_eq!(blocks(&index, &[1, 99, 2]), 1);
}

#[test]
fn some_specs_never_match() {
    let held = "FSM:64 FSM:64";
    let rows = [
        (CacheSpec { components: 0, ..FULL }, 0),
        (CacheSpec { version: 0, ..FULL }, 2),
        (CacheSpec { version: 1, ..FULL }, 2),
        (CacheSpec { version: 2, ..FULL }, 0),
        (CacheSpec { version: u32::MAX, ..ALL }, 0),
        (CacheSpec { swa_window_tokens: 0, ..SWA }, 0),
        (CacheSpec { swa_window_tokens: 1, ..SWA }, 2),
        (CacheSpec { swa_window_tokens: 0, ..MAMBA }, 2),
        (CacheSpec { swa_window_tokens: 0, ..ALL }, 0),
    ];
    for (spec, expected) in rows {
        check(Some(spec), held, expected);
    }
}

#[test]
fn full_must_stand_on_every_block_at_a_servable_tier_of_its_mask() {
    let only = |full_tier_mask| CacheSpec { full_tier_mask, ..FULL };
    let rows = [
        (FULL, "F F F", 3),
        (FULL, "F F@d FSM", 3),
        (FULL, "F . F", 1),
        (FULL, "F - F", 1),
        (FULL, "F SM F", 1),
        (FULL, "F F@s F", 1),
        (FULL, "F F@s+F@d F", 3),
        (FULL, "F F@h+-@d Fx", 3),
        (only(1 << 1), "F F@d", 1),
        (only(1 << 2), "F@d F", 1),
        (only(1 << 2), "F@d S@h+F@d", 2),
        (only(1 << 3), "F@s F@s", 0),
        (only(0), "F F", 0),
        (only(1), "F F", 0),
        (only(u32::MAX), "F F@d F@s", 2),
        // FULL is asked for even where the spec does not name it.
        (CacheSpec { components: CacheSpec::MAMBA, ..FULL }, "M FM", 0),
        (CacheSpec { components: CacheSpec::MAMBA, ..FULL }, "F FM", 2),
        (CacheSpec { components: 8, ..FULL }, "F F -", 2),
    ];
    for (spec, held, expected) in rows {
        check(Some(spec), held, expected);
    }
}

#[test]
fn the_swa_run_reaches_the_head_or_covers_the_window() {
    let at = |swa_tier_mask| CacheSpec { swa_tier_mask, ..SWA };
    let wide = CacheSpec { swa_window_tokens: u32::MAX, ..SWA };
    let rows = [
        // The head: no tokens needed.
        (SWA, "FS", 1),
        (SWA, "FS FS FS", 3),
        // The boundary's own block must carry it.
        (SWA, "FS FS F", 2),
        (SWA, "F F F", 0),
        // Cut off from the head: 16 of 32 tokens, then exactly 32, then one short of it.
        (SWA, "F FS:16", 0),
        (SWA, "F FS:16 FS:16", 3),
        (SWA, "F FS:16 FS:15", 0),
        (SWA, "F FS:16 FS:15 FS:1", 4),
        (SWA, "F FS:32", 2),
        // A shorter boundary stands where the longer one fails, and the other way round.
        (SWA, "FS F FS:16", 1),
        (SWA, "FS F FS:16 FS:16", 4),
        (SWA, "FS F FS:16 FS:16 F FS:31", 4),
        // Unknown sizes add nothing, but do not break the run.
        (SWA, "F FS FS FS", 0),
        (SWA, "F FS:16 FS FS:16", 4),
        // A block without it breaks the run, whatever its tokens.
        (SWA, "F FS:31 F:64 FS:31", 0),
        // A missing FULL ends the search, a run behind it does not help.
        (SWA, "FS S:64 FS:64", 1),
        (SWA, "FS . FS:64", 1),
        // The two components may stand at different tiers.
        (SWA, "F@h+S@d:32 F@d+S@h:32", 2),
        (SWA, "FS F@h+S@s:32", 1),
        (at(1 << 1), "FS F@h+S@d:32", 1),
        (at(1 << 2), "FS F@h+S@d:32", 2),
        (at(1 << 3), "F@h+S@s F", 0),
        (at(0), "FS:32", 0),
        // Sums beyond 32 bits.
        (wide, "F FS:4294967295", 2),
        (wide, "F FS:4294967294", 0),
        (wide, "F FS:4294967294 FS:4294967294", 3),
    ];
    for (spec, held, expected) in rows {
        check(Some(spec), held, expected);
    }
}

#[test]
fn mamba_must_stand_on_the_last_block() {
    let rows = [
        (MAMBA, "FM", 1),
        (MAMBA, "F F FM", 3),
        (MAMBA, "F FM F", 2),
        (MAMBA, "FM F FM F", 3),
        (MAMBA, "F F F", 0),
        (MAMBA, "FM M FM", 1),
        (MAMBA, "F F@h+M@d", 2),
        (MAMBA, "FM F@h+M@s", 1),
        (CacheSpec { mamba_tier_mask: 1 << 1, ..MAMBA }, "FM F@h+M@d", 1),
        (CacheSpec { mamba_tier_mask: 0, ..MAMBA }, "FM", 0),
    ];
    for (spec, held, expected) in rows {
        check(Some(spec), held, expected);
    }
}

#[test]
fn all_three_must_hold_at_one_boundary() {
    let rows = [
        ("FSM", 1),
        ("FS FM", 0),
        ("FS FSM FS", 2),
        ("FM FS:32 FSM", 3),
        ("FSM F FSM:31", 1),
        ("FSM F FSM:31 FS:1 FSM", 5),
    ];
    for (held, expected) in rows {
        check(Some(ALL), held, expected);
    }
}

#[test]
fn placements_come_and_go_as_reported() {
    let packed = PackedHashes::pack(&[7, 8, 7]);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let report =
        |tier, masks: &'static [u32], tokens: &'static [u32]| Action::Report { tier, hashes, masks, tokens };
    let mut index = NaiveIndex::default();
    batch(&mut index, "w", "", None, &[report(Tier::Ssd, &[1, 2, 0x1_0003], &[16, 0, 0])]);
    let row = |tier, blocks: &[(u32, i64, u32, u32)]| TierRow {
        tier,
        blocks: blocks
            .iter()
            .map(|&(position, hash, mask, tokens)| BlockRow { position, hash, mask, tokens })
            .collect(),
    };
    let ssd = row(Tier::Ssd, &[(0, 8, 2, 0), (2, 7, 0x1_0003, 16)]);
    let matched = index.match_blocks(&[8, 8, 7, 9]);
    assert_eq!(
        matched,
        [WorkerRow { worker_id: "w".into(), address: String::new(), tiers: vec![ssd.clone()] }]
    );
    assert_eq!(index.prefix(&[7]), [], "no address");

    // A second tier with other masks; sizes are the block's, the last known one counts.
    batch(&mut index, "w", "a", None, &[report(Tier::Hbm, &[], &[32, 48, 64])]);
    let hbm = row(Tier::Hbm, &[(0, 8, 0, 48), (2, 7, 0, 64)]);
    let ssd = row(Tier::Ssd, &[(0, 8, 2, 48), (2, 7, 0x1_0003, 64)]);
    assert_eq!(index.match_blocks(&[8, 8, 7, 9])[0].tiers, [hbm, ssd]);

    // What goes with the last placement, and not before.
    index.count_hits(&[7, 7, 8, 9]);
    index.count_hits(&[7]);
    assert_eq!(index.hit_counts(&[9, 8, 7, 8]), [(1, 1), (2, 2)]);
    batch(&mut index, "w", "a", None, &[Action::Revoke { tier: Tier::Hbm, hashes: hashes.first(1) }]);
    assert_eq!(index.hit_counts(&[7]), [(0, 2)]);
    batch(&mut index, "w", "a", None, &[Action::ClearTier { tier: Tier::Ssd }]);
    assert_eq!(index.hit_counts(&[7, 8]), [(1, 1)]);
    batch(&mut index, "w", "a", None, &[report(Tier::Hbm, &[], &[])]);
    assert_eq!(index.match_blocks(&[7, 8])[0].tiers, [row(Tier::Hbm, &[(0, 7, 0, 0), (1, 8, 0, 48)])]);
}

#[test]
fn a_refused_batch_changes_nothing() {
    let packed = PackedHashes::pack(&[1, 2]);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let none = hashes.first(0);
    let tier = Tier::Hbm;
    let good = Action::Report { tier, hashes, masks: &[], tokens: &[] };
    let rows = [
        (Action::Report { tier, hashes: none, masks: &[], tokens: &[] }, BatchError::NoHashes { action: 1 }),
        (Action::Revoke { tier, hashes: none }, BatchError::NoHashes { action: 1 }),
        (
            Action::Report { tier, hashes, masks: &[1], tokens: &[] },
            BatchError::MetadataLength { action: 1, hashes: 2, metadata: 1 },
        ),
        (
            Action::Report { tier, hashes, masks: &[], tokens: &[1, 2, 3] },
            BatchError::MetadataLength { action: 1, hashes: 2, metadata: 3 },
        ),
    ];
    let mut index = NaiveIndex::default();
    for (bad, expected) in rows {
        let actions = [good, bad];
        let batch =
            Batch { worker_id: "w", worker_address: "a", cache_spec: Some(FULL), seq: 1, actions: &actions };
        assert_eq!(index.apply(&batch), Err(expected));
        let nameless = Batch { worker_id: "", actions: &[], ..batch };
        assert_eq!(index.apply(&nameless), Err(BatchError::EmptyWorkerId));
        assert!(index.workers.is_empty());
    }
}

#[test]
fn matches_stand_longest_first_and_say_how_far_a_scan_may_look() {
    let packed = PackedHashes::pack(&[1, 2, 3]);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let report =
        |count| Action::Report { tier: Tier::Dram, hashes: hashes.first(count), masks: &[], tokens: &[] };
    let mut index = NaiveIndex::default();
    for (id, address, count) in [("c", "x", 1), ("b", "x", 2), ("a", "x", 1), ("d", "", 3)] {
        batch(&mut index, id, address, None, &[report(count)]);
    }
    let row = |id: &str, blocks| (id.to_owned(), "x".to_owned(), blocks);
    assert_eq!(index.prefix(&[1, 2, 3]), [row("b", 2), row("a", 1), row("c", 1)]);
    assert_eq!(index.blocks_read(&[1, 2, 3, 4]), 3..=4);
    assert_eq!(index.blocks_read(&[1, 2]), 2..=2);
    assert_eq!(index.blocks_read(&[3, 3]), 1..=2, "held, by nobody who may answer");
    assert_eq!(index.blocks_read(&[4, 1, 2]), 1..=1);
    assert_eq!(index.blocks_read(&[]), 0..=0);
}
