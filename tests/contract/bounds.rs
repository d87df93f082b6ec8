//! What is refused, with which code, and that a refused call leaves everything as it was.

use tonic::Code;

use crate::served::*;

/// Blocks known before a refusal, and one that only a refused batch reports.
const BLOCKS: [i64; 5] = [1, 2, 3, 4, 50];

fn known() -> [Apply; 2] {
    let full = report(HBM, &[1, 2, 3], &[FULL; 3], &[16; 3]);
    let spare = report(DRAM, &[3, 4], &[FULL; 2], &[]);
    [
        Apply { cache_spec: spec(FULL, 0), ..batch("w", &[full, spare]) },
        batch("v", &[report(SSD, &[1, 2], &[], &[])]),
    ]
}

/// A batch that would change everything about `w` if anything of it were applied, ending in `last`.
fn upheaval(last: &[Action]) -> Apply {
    let changes = [report(HBM, &[50, 1], &[7, 7], &[99, 99]), revoke(HBM, &[2]), clear(DRAM)];
    Apply { worker_address: "http://moved".to_owned(), ..batch("w", &[&changes[..], last].concat()) }
}

async fn check(what: &str, refused: &Apply, expected: Code) {
    let mut served = Served::with(&known()).await;
    served.held(&[1, 2, 50], true).await;
    let before = served.snapshot(&BLOCKS).await;
    assert_eq!(served.apply_code(refused).await, expected, "{what}");
    assert_eq!(served.snapshot(&BLOCKS).await, before, "{what}");
}

#[tokio::test]
async fn invalid_batches_change_nothing() {
    let good = report(HBM, &[1, 2], &[], &[]);
    let rows = [
        ("type 0", Action { r#type: 0, ..good.clone() }),
        ("type 4", Action { r#type: 4, ..good.clone() }),
        ("type -1", Action { r#type: -1, ..good.clone() }),
        ("type beyond all", Action { r#type: i32::MAX, ..good.clone() }),
        ("report at tier 0", Action { tier: 0, ..good.clone() }),
        ("report at tier 4", Action { tier: 4, ..good.clone() }),
        ("report at tier -1", Action { tier: -1, ..good.clone() }),
        ("revoke at tier 0", revoke(0, &[1])),
        ("revoke at tier 4", revoke(4, &[1])),
        ("clear at tier 0", clear(0)),
        ("clear at tier 4", clear(4)),
        ("an action without anything", Action::default()),
        ("report of nothing", report(HBM, &[], &[], &[])),
        ("report of metadata alone", report(HBM, &[], &[1], &[1])),
        ("revoke of nothing", revoke(HBM, &[])),
        ("too few masks", report(HBM, &[1, 2], &[1], &[])),
        ("too many masks", report(HBM, &[1, 2], &[1, 1, 1], &[])),
        ("too few sizes", report(HBM, &[1, 2], &[], &[1])),
        ("too many sizes", report(HBM, &[1, 2], &[], &[1, 1, 1])),
        ("masks right and sizes wrong", report(HBM, &[1, 2], &[1, 1], &[1])),
        ("sizes right and masks wrong", report(HBM, &[1, 2], &[1], &[1, 1])),
        ("too many masks of a revoke", Action { component_masks: vec![1, 1], ..revoke(HBM, &[1]) }),
        ("too many sizes of a revoke", Action { block_sizes: vec![1, 1], ..revoke(HBM, &[1]) }),
    ];
    for (what, last) in rows {
        check(what, &upheaval(&[last]), Code::InvalidArgument).await;
    }
    check("no name", &Apply { worker_id: String::new(), ..upheaval(&[]) }, Code::InvalidArgument).await;
    check(
        "no name, no actions",
        &Apply { worker_id: String::new(), ..batch("w", &[]) },
        Code::InvalidArgument,
    )
    .await;
}

#[tokio::test]
async fn batches_over_a_bound_change_nothing() {
    let many = |count: i64| report(SSD, &(1_000..1_000 + count).collect::<Vec<_>>(), &[], &[]);
    let rows = [
        ("257 actions", upheaval(&vec![clear(SSD); 254])),
        ("16,385 hashes at once", upheaval(&[many(16_385 - 3)])),
        ("16,385 hashes in two actions", upheaval(&[many(8_192), many(8_193 - 3)])),
        (
            "16,385 hashes, some of a revoke",
            upheaval(&[many(16_000), Action { r#type: REVOKE, ..many(382) }]),
        ),
        ("16,385 hashes, all the same", upheaval(&[report(HBM, &[1; 16_385 - 3], &[], &[])])),
        ("16,385 hashes, some of a clear", upheaval(&[many(16_000), Action { r#type: CLEAR, ..many(382) }])),
    ];
    for (what, refused) in rows {
        check(what, &refused, Code::ResourceExhausted).await;
    }
}

#[tokio::test]
async fn batches_up_to_the_bounds_are_applied() {
    let mut served = Served::start().await;
    let actions: Vec<Action> = (0..256).map(|hash| report(HBM, &[hash], &[], &[])).collect();
    served.apply(&batch("many", &actions)).await;
    let blocks: Vec<i64> = (0..16_384).collect();
    served.apply(&batch("long", &[report(HBM, &blocks, &[], &[])])).await;
    let halves = [report(DRAM, &blocks[..8_192], &[], &[]), report(DRAM, &blocks[8_192..], &[], &[])];
    served.apply(&batch("halves", &halves)).await;
    let answer = served.prefix(&blocks, 0).await;
    assert_eq!(answer.best_prefix_blocks, 16_384);
    assert_eq!(answer.matches.len(), 3);
    assert_eq!(answer.matches[2].matched_prefix_blocks, 256);
}

#[tokio::test]
async fn queries_are_bounded() {
    let mut served = Served::with(&known()).await;
    let blocks: Vec<i64> = (1..=16_385).collect();
    let repeats = [1; 16_385];

    assert_eq!(served.held_code(&[]).await, Code::InvalidArgument);
    assert_eq!(served.held_code(&blocks[..16_384]).await, Code::Ok);
    assert_eq!(served.held_code(&blocks).await, Code::ResourceExhausted);
    assert_eq!(served.held_code(&repeats).await, Code::ResourceExhausted, "bounded as sent");

    assert_eq!(served.counts_code(&[]).await, Code::InvalidArgument);
    assert_eq!(served.counts_code(&blocks[..16_384]).await, Code::Ok);
    assert_eq!(served.counts_code(&blocks).await, Code::ResourceExhausted);
    assert_eq!(served.counts_code(&repeats).await, Code::ResourceExhausted);

    assert_eq!(served.prefix_code(&[], 0).await, Code::InvalidArgument);
    assert_eq!(served.prefix_code(&[], 5).await, Code::InvalidArgument);
    assert_eq!(served.prefix_code(&blocks, 0).await, Code::Ok, "no bound but the message's");

    // The look-ups that were refused counted nothing.
    let counts = served.counts(&[1, 2, 3, 4]).await;
    assert!(counts.iter().all(|entry| entry.hit_count_total == 1), "{counts:?}");
    assert_eq!(counts.len(), 4);
}

#[tokio::test]
async fn a_prompt_over_eight_mebibytes_is_out_of_range() {
    let mut served = Served::with(&known()).await;
    // A tag and three bytes of length stand before the hashes.
    let over = vec![2; 1_048_576];
    assert_eq!(served.prefix_code(&over, 1).await, Code::OutOfRange);
    assert_eq!(served.prefix_code(&over[1..], 1).await, Code::Ok);
}
