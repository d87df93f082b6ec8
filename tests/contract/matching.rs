//! `MatchExternalKv` and the hit counts.

use crate::served::*;

fn fleet() -> [Apply; 3] {
    [
        batch("a", &[report(HBM, &[1, 2, 3], &[1, 2, 3], &[16, 0, 48]), report(SSD, &[3, 1], &[], &[])]),
        Apply { worker_address: String::new(), ..batch("b", &[report(DRAM, &[2], &[], &[])]) },
        batch("c", &[]),
    ]
}

#[tokio::test]
async fn matches_stand_in_request_order_at_first_places() {
    let rows: [(&[i64], &str); 6] = [
        (&[9], ""),
        (&[1], "a@http://a HBM[1/1/16] SSD[1/0/16]"),
        (&[3, 9, 1], "a@http://a HBM[3/3/48 1/1/16] SSD[3/0/48 1/0/16]"),
        (&[2, 2, 1, 2, 1], "a@http://a HBM[2/2/0 1/1/16] SSD[1/0/16], b@ DRAM[2/0/0]"),
        (&[9, 3, 2, 1, 3], "a@http://a HBM[3/3/48 2/2/0 1/1/16] SSD[3/0/48 1/0/16], b@ DRAM[2/0/0]"),
        (&[2, -2], "a@http://a HBM[2/2/0], b@ DRAM[2/0/0]"),
    ];
    let mut served = Served::with(&fleet()).await;
    for (hashes, expected) in rows {
        assert_eq!(text(&served.held(hashes, false).await), expected, "{hashes:?}");
        assert_eq!(text(&served.held(hashes, true).await), expected, "{hashes:?}, counted");
    }
}

/// Asks as `counted` says after the fleet's batches, applies `then`, and reads the counts of 3, 2, 1, 9.
async fn check(what: &str, counted: &[(&[i64], bool)], then: &[Apply], expected: &[(i64, u64)]) {
    let mut served = Served::with(&fleet()).await;
    for (hashes, count) in counted {
        served.held(hashes, *count).await;
    }
    for batch in then {
        served.apply(batch).await;
    }
    let counts = served.counts(&[3, 3, 2, 1, 9, 2]).await;
    let counts: Vec<(i64, u64)> = counts.iter().map(|entry| (entry.hash, entry.hit_count_total)).collect();
    assert_eq!(counts, expected, "{what}");
}

#[tokio::test]
async fn hits_are_counted_when_asked_for_and_forgotten_with_the_block() {
    let revoked = |worker: &str, tier, hash| Apply {
        worker_address: String::new(),
        ..batch(worker, &[revoke(tier, &[hash])])
    };
    let again = batch("c", &[report(HBM, &[2], &[], &[])]);
    check("never asked", &[], &[], &[]).await;
    check("asked without counting", &[(&[1, 2, 3], false)], &[], &[]).await;
    check("counted", &[(&[1, 2, 9], true), (&[1], true)], &[], &[(2, 1), (1, 2)]).await;
    check("repeats count once", &[(&[1, 1, 1], true)], &[], &[(1, 1)]).await;
    check("once per block, not per holder or tier", &[(&[1, 2, 3], true)], &[], &[(3, 1), (2, 1), (1, 1)])
        .await;
    check(
        "a block reported later has no count",
        &[(&[9], true)],
        &[batch("c", &[report(HBM, &[9], &[], &[])])],
        &[],
    )
    .await;
    check("one of two holders gone", &[(&[2], true)], &[revoked("a", HBM, 2)], &[(2, 1)]).await;
    let both = [revoked("a", HBM, 2), revoked("b", DRAM, 2)];
    check("both gone", &[(&[1, 2], true)], &both, &[(1, 1)]).await;
    let both_and_again = [revoked("a", HBM, 2), revoked("b", DRAM, 2), again];
    check("reported again", &[(&[2], true)], &both_and_again, &[]).await;
    check("one of two tiers cleared", &[(&[2, 3], true)], &[batch("a", &[clear(HBM)])], &[(3, 1), (2, 1)])
        .await;
    let cleared = [batch("a", &[clear(HBM), clear(SSD)])];
    check("all tiers cleared", &[(&[1, 2, 3], true)], &cleared, &[(2, 1)]).await;
    let cut = batch("a", &[clear(HBM), clear(SSD), report(HBM, &[1, 3], &[], &[])]);
    check("cleared and reported in one batch", &[(&[1, 2, 3], true)], &[cut], &[(2, 1)]).await;
}

#[tokio::test]
async fn prefix_queries_and_look_ups_of_counts_count_nothing() {
    let mut served = Served::with(&fleet()).await;
    served.prefix(&[1, 2, 3], 0).await;
    served.counts(&[1, 2, 3]).await;
    assert_eq!(served.counts(&[1, 2, 3]).await, []);
}
